// One connection: a `Machine` over a WebSocket, and the calls that are open on it.

import { Signal, bytesOf, joined } from "./bytes.js";
import { ChannelError } from "./errors.js";
import { BUFFERED_BYTES_MAX, BUFFERED_LOOK_MS, CHUNK_BYTES_MAX } from "./limits.js";
import { CODE, Machine } from "./machine.js";

const SUBPROTOCOL = "sl.1";
const OPEN = 1;
const LOST = Object.freeze({ code: CODE.OK, reason: "", retryAfterMs: null, byPeer: false });

/** One call of ours. */
export class Call {
  reply = null;
  #link = null;
  #id = 0;
  #chunks = [];
  #error = null;
  #whole = false;
  #changed = new Signal();
  #credited = new Signal();

  get ended() {
    return this.#whole || this.#error !== null;
  }

  /** It went out: from now on the work may be done. */
  get sent() {
    return this.#link !== null;
  }

  /** Waits for the beginning of the answer. */
  async head() {
    while (this.reply === null) {
      if (this.#error) throw this.#error;
      await this.#changed.wait();
    }
    return this.reply;
  }

  /** Gives the next piece of the answer, null at its end; it ends only where it is whole. */
  async chunk() {
    for (;;) {
      if (this.#chunks.length) {
        const chunk = this.#chunks.shift();
        this.#link.consume(this.#id, chunk.length);
        return chunk;
      }
      if (this.#error) throw this.#error;
      if (this.#whole) return null;
      await this.#changed.wait();
    }
  }

  /** Gives it up; harmless after its end. */
  leave() {
    this.#link?.forget(this.#id, this.#error?.code === CODE.CALL_DEADLINE ? CODE.CALL_DEADLINE : CODE.CALL_CANCELLED);
    this.#whole = true;
    this.#changed.notify();
    this.#credited.notify();
  }

  // -- for the link ------------------------------------------------------------------------------------------------

  opened(link, id) {
    this.#link = link;
    this.#id = id;
  }

  take(body, whole) {
    if (body.length) this.#chunks.push(body);
    this.#whole ||= whole;
    this.#changed.notify();
  }

  fail(error) {
    this.#error ??= error;
    this.#changed.notify();
    this.#credited.notify();
  }

  credited() {
    this.#credited.notify();
  }

  creditWait() {
    return this.#credited.wait();
  }
}

/** A call of the server. */
class Served {
  ended = false;
  abort = new AbortController();
  #chunks;
  #more;
  #changed = new Signal();
  #credited = new Signal();

  constructor(call) {
    this.#chunks = [call.body];
    this.#more = call.more;
  }

  async body() {
    while (this.#more) {
      if (this.ended) throw new ChannelError("the caller has gone", { code: CODE.CALL_CANCELLED });
      await this.#changed.wait();
    }
    return joined(this.#chunks);
  }

  feed(body, end) {
    this.#chunks.push(body);
    this.#more = !end;
    this.#changed.notify();
  }

  end() {
    this.ended = true;
    this.abort.abort();
    this.#changed.notify();
    this.#credited.notify();
  }

  credited() {
    this.#credited.notify();
  }

  creditWait() {
    return this.#credited.wait();
  }
}

/** One session: over one WebSocket, and where the server keeps it over the next ones.
 *
 * The owner is told by `linkRoom` (calls may be opened), `linkWelcomed`, `linkPushed`, `linkCalled`, `linkNoticed`,
 * `linkLeaving`, `linkDetached` (the connection is gone: `connect` goes on with the session) and, last, `linkEnded`. */
export class Link {
  welcome = null;
  #url;
  #hello;
  #owner;
  #socket = null;
  #machine = new Machine(performance.now());
  #calls = new Map();
  #served = new Map();
  #timer = null;
  #over = false;

  constructor(url, hello, owner) {
    this.#url = url;
    this.#hello = hello;
    this.#owner = owner;
    this.connect();
  }

  /** Opens a WebSocket, the first or the next one. */
  connect() {
    this.#socket?.close();
    const socket = (this.#socket = new WebSocket(this.#url, SUBPROTOCOL));
    const current = () => this.#socket === socket && !this.#over;
    let greeted = false;
    socket.binaryType = "arraybuffer";
    socket.onopen = async () => {
      let fields;
      try {
        fields = await this.#hello();
      } catch (error) {
        if (current()) this.#end({ ...LOST, reason: `no token: ${error?.message ?? error}` });
        return;
      }
      if (!current() || socket.readyState !== OPEN) return;
      this.#machine.hello(fields, performance.now());
      greeted = true;
      this.#owner.linkRoom(this); // the first calls go in the flight of the HELLO
      this.#pump();
    };
    socket.onmessage = ({ data }) => {
      if (!current() || !greeted) return;
      if (typeof data === "string") this.#machine.close(CODE.PROTOCOL_ERROR, "a text message");
      else this.#machine.receive(new Uint8Array(data), performance.now());
      this.#pump();
    };
    socket.onclose = () => {
      if (current()) this.#gone();
    };
  }

  get mayCall() {
    return !this.#over && this.#socket.readyState === OPEN && this.#machine.mayCall;
  }

  get idle() {
    return this.#calls.size === 0 && this.#served.size === 0;
  }

  /** Sends a call; only where `mayCall`. */
  open(call, head, bytes, deadlineMs) {
    const more = bytes.length > CHUNK_BYTES_MAX;
    const id = this.#machine.call({ ...head, body: bytes.subarray(0, CHUNK_BYTES_MAX), more, deadlineMs });
    call.opened(this, id);
    this.#calls.set(id, call);
    this.#pump();
    if (more) this.#sendBody(id, call, bytes.subarray(CHUNK_BYTES_MAX)).catch((error) => call.fail(error));
  }

  consume(id, size) {
    this.#machine.consume(id, size);
    this.#pump();
  }

  forget(id, code) {
    if (!this.#calls.delete(id)) return;
    this.#machine.cancel(id, code);
    this.#pump();
    this.#freed();
  }

  /** Asks for a sign of life; a dead connection ends within seconds. */
  check() {
    this.#machine.ping(performance.now());
    this.#pump();
  }

  close() {
    if (this.#machine.state === "new") this.#end({ ...LOST, reason: "closed" });
    else this.#machine.close();
    this.#pump();
  }

  /** Answers a call of the server with what `handler` gives. */
  async answer(call, handler) {
    const served = new Served(call);
    this.#served.set(call.id, served);
    try {
      const body = await served.body();
      const bytes = bytesOf(await handler({ method: call.method, headers: call.headers, body, signal: served.abort.signal }));
      if (served.ended) return;
      const more = bytes.length > CHUNK_BYTES_MAX;
      this.#machine.reply(call.id, { body: bytes.subarray(0, CHUNK_BYTES_MAX), more });
      this.#pump();
      if (more) await this.#sendBody(call.id, served, bytes.subarray(CHUNK_BYTES_MAX));
    } catch (error) {
      if (!served.ended) this.#machine.fail(call.id, CODE.CALL_FAILED, String(error?.message ?? error), true);
    } finally {
      this.#served.delete(call.id);
      this.#pump();
      this.#freed();
    }
  }

  refuse(call, code, reason) {
    this.#machine.fail(call.id, code, reason);
    this.#pump();
  }

  async #sendBody(id, call, bytes) {
    while (!call.ended && bytes.length) {
      const size = Math.min(bytes.length, CHUNK_BYTES_MAX, this.#machine.credit(id));
      if (size === 0) {
        await call.creditWait();
        continue;
      }
      this.#machine.data(id, bytes.subarray(0, size), size === bytes.length);
      bytes = bytes.subarray(size);
      this.#pump();
      while (this.#socket.bufferedAmount > BUFFERED_BYTES_MAX && !call.ended) {
        await new Promise((resolve) => setTimeout(resolve, BUFFERED_LOOK_MS));
      }
    }
  }

  #freed() {
    if (!this.#over) this.#owner.linkRoom(this);
  }

  /** Sends what the machine has to say, acts on what it has heard, and sets the timer. */
  #pump() {
    const machine = this.#machine;
    if (this.#over) return;
    const events = machine.events();
    const frames = machine.take();
    if (this.#socket.readyState === OPEN) for (const frame of frames) this.#socket.send(frame);
    for (const event of events) this[`_${event.event}`](event);
    if (this.#over) return;
    clearTimeout(this.#timer);
    const due = machine.due();
    if (due === null) return;
    this.#timer = setTimeout(() => {
      machine.tick(performance.now());
      this.#pump();
    }, Math.max(0, due - performance.now()));
  }

  /** The connection below is gone. */
  #gone() {
    if (this.#machine.state === "new") this.#end({ ...LOST, reason: "no connection" });
    else if (this.#machine.state === "detached" || this.#machine.detach()) {
      clearTimeout(this.#timer);
      this.#socket.close();
      this.#owner.linkDetached(this);
    } else this.#pump();
  }

  _silent() {
    const socket = this.#socket;
    this.#gone();
    socket.close();
  }

  _welcomed({ welcome }) {
    this.welcome = welcome;
    this.#owner.linkWelcomed(this, welcome);
  }

  _replied({ reply }) {
    const call = this.#calls.get(reply.id);
    if (!call) return;
    call.reply = reply;
    this.#arrived(reply.id, call, reply.body, !reply.more);
  }

  _data({ data }) {
    const served = this.#served.get(data.id);
    if (served) {
      served.feed(data.body, data.end);
      this.#machine.consume(data.id, data.body.length);
    } else if (this.#calls.has(data.id)) {
      this.#arrived(data.id, this.#calls.get(data.id), data.body, data.end);
    }
  }

  #arrived(id, call, body, whole) {
    if (whole) this.#calls.delete(id);
    call.take(body, whole);
    if (whole) this.#freed();
  }

  _failed({ id, code, reason, retryAfterMs, maybeDelivered }) {
    const call = this.#calls.get(id);
    this.#calls.delete(id);
    call?.fail(new ChannelError(reason || `the call failed with code ${code}`, { code, retryAfterMs, maybeDelivered }));
    this.#freed();
  }

  _credited({ id }) {
    (this.#calls.get(id) ?? this.#served.get(id))?.credited();
  }

  _called({ call }) {
    this.#owner.linkCalled(this, call);
  }

  _cancelled({ id }) {
    this.#served.get(id)?.end();
  }

  _pushed({ push }) {
    this.#owner.linkPushed(push, () => {
      this.#machine.ack([push.seq]);
      this.#pump();
    });
  }

  _noticed({ version, hosts }) {
    this.#owner.linkNoticed({ version, hosts });
  }

  _ponged() {}

  _leaving({ spreadMs }) {
    this.#owner.linkLeaving(this, spreadMs);
  }

  _closed(closed) {
    this.#end(closed);
  }

  #end(closed) {
    if (this.#over) return;
    this.#over = true;
    clearTimeout(this.#timer);
    this.#socket.close();
    // Refused before its first WELCOME, a server has looked at nothing else; whatever went out later may have arrived.
    const maybeDelivered = this.welcome !== null || !closed.byPeer;
    const { code, reason, retryAfterMs } = closed;
    const error = new ChannelError(reason || "the connection ended", { code, retryAfterMs, maybeDelivered });
    for (const call of this.#calls.values()) call.fail(error);
    for (const served of this.#served.values()) served.end();
    this.#calls.clear();
    this.#served.clear();
    this.#owner.linkEnded(this, closed, error);
  }
}

