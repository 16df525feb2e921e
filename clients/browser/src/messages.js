// Every message of the long connection: the table of docs/reference/protocol.md, section 3, and their frames.

import { FRAME_BYTES_MAX } from "./limits.js";
import { Reader, Violation, Writer } from "./msgpack.js";

const type = (name) => ({ read: (reader) => reader[name](), write: (writer, value) => writer[name](value) });
const integer = type("integer");
const text = type("text");
const binary = type("binary");
const boolean = type("boolean");
const float = type("float");
const orNil = (of) => ({
  read: (reader) => (reader.nextIsNil ? reader.nil() : of.read(reader)),
  write: (writer, value) => (value === null ? writer.nil() : of.write(writer, value)),
});
const listOf = (of) => ({
  read: (reader) => Array.from({ length: reader.array() }, () => of.read(reader)),
  write(writer, values) {
    writer.array(values.length);
    for (const value of values) of.write(writer, value);
  },
});
const pair = {
  read(reader) {
    if (reader.array() !== 2) throw new Violation("a header is a pair");
    return [reader.text(), reader.text()];
  },
  write(writer, [name, value]) {
    writer.array(2);
    writer.text(name);
    writer.text(value);
  },
};
const headers = listOf(pair);
const NOTHING = Object.freeze([]);
const NO_BYTES = new Uint8Array(0);

// [name, type, default]; one without a default is required. The place in the list is the tag.
const TABLE = [
  ["Hello", [
    ["versions", listOf(integer)], ["app", text], ["token", text, ""], ["unit", text, ""], ["resume", text, ""],
    ["received", integer, 0], ["network", text, "unknown"], ["client", text, ""],
    ["capabilities", listOf(text), NOTHING], ["app_version", text, ""], ["tags", listOf(text), NOTHING],
  ]],
  ["Welcome", [
    ["version", integer], ["session", text], ["device", text], ["user", text, ""], ["unit", text, ""],
    ["unit_epoch", integer, 0], ["resume", text, ""], ["resume_window_s", float, 0], ["resumed", boolean, false],
    ["heartbeat_s", float, 0], ["time_ms", integer, 0], ["capabilities", listOf(text), NOTHING],
    ["received", integer, 0], ["return_spread_s", float, 0],
  ]],
  ["Close", [["code", integer], ["reason", text, ""], ["retry_after_ms", orNil(integer), null]]],
  ["Call", [
    ["id", integer], ["gate", text], ["method", text], ["target", text, ""], ["headers", headers, NOTHING],
    ["body", binary, NO_BYTES], ["more", boolean, false], ["deadline_ms", orNil(integer), null],
  ]],
  ["Data", [["id", integer], ["body", binary], ["end", boolean, false], ["trailers", headers, NOTHING]]],
  ["Reply", [
    ["id", integer], ["status", integer], ["headers", headers, NOTHING], ["body", binary, NO_BYTES],
    ["more", boolean, false],
  ]],
  ["Fail", [
    ["id", integer], ["code", integer], ["reason", text, ""], ["retry_after_ms", orNil(integer), null],
    ["maybe_delivered", boolean, false],
  ]],
  ["Cancel", [["id", integer], ["code", integer, 503]]],
  ["Credit", [["id", integer], ["size", integer]]],
  ["Push", [
    ["seq", integer], ["id", text], ["topic", text, ""], ["headers", headers, NOTHING], ["body", binary, NO_BYTES],
    ["expires_ms", orNil(integer), null],
  ]],
  ["Ack", [["seqs", listOf(integer)]]],
  ["Ping", [["nonce", integer]]],
  ["Pong", [["nonce", integer]]],
  ["GoAway", [
    ["code", integer], ["last_call", integer], ["reason", text, ""], ["spread_ms", integer, 0],
    ["retry_after_ms", orNil(integer), null],
  ]],
  ["Notice", [["version", integer], ["hosts", listOf(text), NOTHING]]],
  ["Received", [["count", integer]]],
];
const TAGS = new Map(TABLE.map(([name], tag) => [name, tag]));

/** Names of the messages in the order of their tags. */
export const NAMES = TABLE.map(([name]) => name);

/** Gives the frame of a message: `{type: "Ping", nonce: 1}`; fields left out have their defaults. */
export function encode(message) {
  const tag = TAGS.get(message.type);
  const fields = TABLE[tag][1];
  const writer = new Writer();
  writer.room(4);
  writer.array(1 + fields.length);
  writer.integer(tag);
  for (const [name, { write }, fallback] of fields) write(writer, message[name] ?? fallback);
  writer.uint32At(0, writer.size - 4);
  if (writer.size - 4 > FRAME_BYTES_MAX) throw new RangeError(`${message.type} of ${writer.size - 4} bytes`);
  return writer.taken();
}

/** Reads a payload; throws `Violation` where it is no message. */
export function decode(payload) {
  const reader = new Reader(payload);
  const given = reader.array() - 1;
  if (given < 0) throw new Violation("a message without a tag");
  const entry = TABLE[reader.integer()];
  if (entry === undefined) throw new Violation("unknown tag");
  const [name, fields] = entry;
  const message = { type: name };
  for (const [place, [field, { read }, fallback]] of fields.entries()) {
    if (place < given) message[field] = read(reader);
    else if (fallback === undefined) throw new Violation(`${name} without ${field}`);
    else message[field] = fallback;
  }
  for (let more = fields.length; more < given; more++) reader.skip();
  if (reader.left) throw new Violation("bytes after the message");
  return message;
}

/** Cuts a stream of bytes into payloads. */
export class Frames {
  #bytes = NO_BYTES;

  /** Adds bytes that came. */
  feed(bytes) {
    if (this.#bytes.length === 0) this.#bytes = bytes;
    else {
      const joined = new Uint8Array(this.#bytes.length + bytes.length);
      joined.set(this.#bytes);
      joined.set(bytes, this.#bytes.length);
      this.#bytes = joined;
    }
  }

  /** Gives the next payload, null where it is not whole yet; throws `Violation` for a length that must not be. */
  next() {
    if (this.#bytes.length < 4) return null;
    const size = new DataView(this.#bytes.buffer, this.#bytes.byteOffset).getUint32(0);
    if (size > FRAME_BYTES_MAX) throw new Violation(`a frame of ${size} bytes`, 403);
    if (size === 0) throw new Violation("an empty frame");
    if (this.#bytes.length < 4 + size) return null;
    const payload = this.#bytes.subarray(4, 4 + size);
    this.#bytes = this.#bytes.subarray(4 + size);
    return payload;
  }
}
