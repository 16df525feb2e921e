// The published vectors, read and written by the browser's client.

import { CODE, Frames, Machine, NAMES, Violation, decode, encode } from "../src/stormline.js";
import { bytesOf, equal, hexOf, run, test, throws } from "./run.js";

const exact = (key, value, { source }) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) ? BigInt(source) : value;
const vectors = JSON.parse(await (await fetch("/vectors/protocol.json")).text(), exact);
const plain = (value) => {
  if (Array.isArray(value)) return value.map(plain);
  return value !== null && typeof value === "object" ? bytesOf(value.hex) : value;
};
const message = ({ message: type, fields }) => {
  const named = Object.entries(fields).map(([name, value]) => [name, plain(value)]);
  return { type, ...Object.fromEntries(named) };
};
const payload = (hex) => {
  const frames = new Frames();
  frames.feed(bytesOf(hex));
  return frames.next();
};
const greeted = (given) => {
  const machine = new Machine(0);
  machine.hello({ app: "shop" }, 0);
  for (const frame of given) machine.receive(bytesOf(frame), 0);
  machine.take();
  machine.events();
  return machine;
};

test("every message is known", () => {
  equal(NAMES.filter((name) => !vectors.messages.some((entry) => entry.message === name)), []);
  equal(vectors.messages.filter((entry) => !NAMES.includes(entry.message)), []);
});
for (const entry of vectors.messages) {
  test(`writes ${entry.name}`, () => equal(hexOf(encode(message(entry))), entry.frame));
}
for (const entry of [...vectors.messages, ...vectors.readings]) {
  test(`reads ${entry.name}`, () => equal(decode(payload(entry.frame)), message(entry)));
  test(`reads ${entry.name} byte by byte`, () => {
    const frames = new Frames();
    const bytes = bytesOf(entry.frame);
    for (const byte of bytes.subarray(0, -1)) {
      frames.feed(Uint8Array.of(byte));
      equal(frames.next(), null);
    }
    frames.feed(bytes.subarray(-1));
    equal(decode(frames.next()), message(entry));
  });
  test(`refuses ${entry.name} cut anywhere`, async () => {
    const whole = payload(entry.frame);
    for (let end = 0; end < whole.length; end++) {
      await throws(() => decode(whole.subarray(0, end)), (error) => error instanceof Violation);
    }
  });
}
for (const entry of vectors.invalid.filter(({ role }) => role === "client")) {
  test(`refuses ${entry.name}`, () => {
    const machine = greeted(entry.given);
    machine.receive(bytesOf(entry.frame), 0);
    equal(decode(machine.take().at(-1).subarray(4)).code, entry.code);
    equal(machine.events().at(-1).event, "closed");
    equal(machine.state, "closed");
  });
}
for (const [name, bytes, code] of [
  ["a length of 2 GiB", "80000000", CODE.FRAME_TOO_LARGE],
  ["an empty frame", "00000000", CODE.PROTOCOL_ERROR],
  ["an array of 2^32-1", "00000005ddffffffff", CODE.PROTOCOL_ERROR],
]) {
  test(`refuses ${name}`, () => {
    const machine = greeted([]);
    machine.receive(bytesOf(bytes), 0);
    equal(decode(machine.take().at(-1).subarray(4)).code, code);
  });
}
test("what a session puts out before the WELCOME of its next connection leaves behind it, once and in order", () => {
  const types = (machine) => machine.take().map((frame) => decode(frame.subarray(4)).type);
  const welcome = { type: "Welcome", version: 1, session: "s", device: "d", resume: "r", capabilities: ["resume"] };
  const machine = new Machine(0);
  machine.hello({ app: "shop" }, 0);
  machine.receive(encode(welcome), 0);
  const id = machine.call({ gate: "rpc", method: "a.b", more: true });
  equal(types(machine), ["Hello", "Call"]);
  machine.detach();
  machine.data(id, Uint8Array.of(1));
  machine.hello({ app: "shop" }, 0);
  machine.data(id, Uint8Array.of(2));
  equal(types(machine), ["Hello"]);
  machine.receive(encode({ ...welcome, resumed: true, received: 1 }), 0);
  machine.data(id, Uint8Array.of(3), true);
  equal(machine.take().map((frame) => [...decode(frame.subarray(4)).body]), [[1], [2], [3]]);
});
test("passes over a deep nest in a field of a later version", () => {
  const deep = "91".repeat(60_000) + "c0";
  equal(decode(bytesOf(`930c07${deep}`)), { type: "Pong", nonce: 7 });
});
test("takes any bytes without another error than a violation", () => {
  let seed = 1;
  const chance = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  for (let round = 0; round < 20_000; round++) {
    const entry = vectors.messages[Math.floor(chance() * vectors.messages.length)];
    const bytes = payload(entry.frame).slice();
    for (let changes = 1 + chance() * 3; changes > 0; changes--) bytes[Math.floor(chance() * bytes.length)] = chance() * 256;
    try {
      decode(bytes);
    } catch (error) {
      if (!(error instanceof Violation)) throw new Error(`${hexOf(bytes)}: ${error}`);
    }
  }
});
test("integers come back as they went, in the shortest form", () => {
  const edges = [0n, 127n, 128n, 255n, 256n, 65535n, 65536n, 4294967295n, 4294967296n, 2n ** 53n, 2n ** 63n, 2n ** 64n - 1n];
  for (const edge of [...edges, -1n, -32n, -33n, -128n, -129n, -32768n, -32769n, -(2n ** 31n), -(2n ** 31n) - 1n, -(2n ** 63n)]) {
    const nonce = Number.isSafeInteger(Number(edge)) ? Number(edge) : edge;
    equal(decode(encode({ type: "Ping", nonce }).subarray(4)), { type: "Ping", nonce });
  }
});
await run();
