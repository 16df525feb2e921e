// The client's side of one session as a machine without I/O: bytes and `now` in; frames, events and the next timer out.
//
// Times are milliseconds of any clock that only grows. An event is `{event: NAME, ...}`, see `events`. Where the server
// keeps sessions, one outlives its connection: `detach` when that is gone, `hello` again on the next. What either side had
// not received is sent again, once.

import {
  CALLS_IN_FLIGHT_MAX, CALL_HEADERS_MAX, CALL_HEADER_CHARS_MAX, CHUNK_BYTES_MAX, CREDIT_BYTES,
  CREDIT_WINDOW_BYTES_MAX, HEARTBEAT_ANSWER_S, HEARTBEAT_S, HELLO_TIMEOUT_S, PLAN_HOSTS_MAX, PUSHES_UNACKED_MAX,
  PUSH_BODY_BYTES_MAX, REASON_CHARS_MAX, WIRE_SECONDS_MAX,
} from "./limits.js";
import { COUNTED, Kept } from "./kept.js";
import { Frames, decode, encode } from "./messages.js";
import { Violation } from "./msgpack.js";

export const VERSION = 1;
export const CODE = Object.freeze({
  OK: 0, HELLO_TIMEOUT: 101, HEARTBEAT_TIMEOUT: 102, VERSION_UNSUPPORTED: 401, PROTOCOL_ERROR: 402,
  FRAME_TOO_LARGE: 403, REPLACED: 405, FLOW_CONTROL: 406, CALL_NOT_FOUND: 500, CALL_UNAVAILABLE: 501,
  CALL_DEADLINE: 502, CALL_CANCELLED: 503, CALL_FAILED: 505, CALL_TOO_MANY: 509, GOING_AWAY: 200,
});

const CALL_TRAFFIC = ["Data", "Reply", "Fail", "Cancel", "Credit", "Ping", "Pong", "Received"];
/** What a server may send in each state; a CALL may still come in `draining`, as it may have crossed a GOAWAY. */
const RECEIVED = {
  new: new Set(["Close"]),
  greeting: new Set(["Welcome", "Close"]),
  open: new Set(["Call", "Push", "Notice", "GoAway", "Close", ...CALL_TRAFFIC]),
  draining: new Set(["Call", "Push", "Notice", "GoAway", "Close", ...CALL_TRAFFIC]),
};

export class Machine {
  state = "new";
  #in = new Frames();
  #out = [];
  #events = [];
  #calls = new Map();
  #nextCall = 1;
  #peerCall = 0;
  #peerCalls = 0;
  #pushed = 0;
  #unacked = new Set();
  #heard;
  #ping = null;
  #greetBy = null;
  #heartbeatMs = HEARTBEAT_S * 1000;
  #offered = [];
  #capabilities = new Set();
  #kept = null;
  #token = "";
  #resumable = false;

  constructor(now) {
    this.#heard = now;
  }

  // -- out -------------------------------------------------------------------------------------------------------

  /** Gives and forgets the frames to send now. */
  take() {
    const frames = this.#out;
    this.#out = [];
    return frames;
  }

  get mayCall() {
    return (this.state === "open" || (this.state === "greeting" && !this.#token)) && this.#calls.size - this.#peerCalls < CALLS_IN_FLIGHT_MAX;
  }

  /** Greets the server, also on a further connection of a session that was detached: then no calls are put out before
   * the WELCOME says whether it goes on. */
  hello(fields, now) {
    this.#require(this.state === "new" || this.state === "detached", "a second HELLO");
    this.#offered = [...(fields.capabilities ?? []), "resume"];
    const again = this.#token ? { resume: this.#token, received: this.#kept.received } : {};
    if (!this.#token) this.#kept = new Kept(); // calls in the flight of the HELLO count already
    this.state = "greeting";
    this.#put({ type: "Hello", versions: [VERSION], ...fields, ...again, capabilities: this.#offered });
    this.#heard = now;
    this.#greetBy = now + HELLO_TIMEOUT_S * 1000;
  }

  /** The connection below is gone. True where the session waits for the next one; else it has ended. */
  detach() {
    if (this.state === "closed") return false;
    const stood = this.state === "open" || this.state === "draining" || (this.state === "greeting" && this.#token);
    if (!stood || !this.#resumable) {
      this.#end(CODE.OK, "the connection was lost", { lost: true });
      return false;
    }
    this.state = "detached";
    this.#in = new Frames();
    this.#out = [];
    this.#ping = this.#greetBy = null;
    return true;
  }

  /** Opens a call and gives its id; with `more`, `data` brings the rest of the body. */
  call({ gate, method, target = "", headers = [], body, more = false, deadlineMs = null }) {
    this.#require(this.mayCall, "no new call is possible here");
    this.#check(body, headers);
    const id = this.#nextCall;
    this.#put({ type: "Call", id, gate, method, target, headers, body, more, deadline_ms: deadlineMs });
    this.#nextCall += 2;
    const call = newCall(true, more, false);
    call.sendCredit -= body?.length ?? 0;
    this.#calls.set(id, call);
    return id;
  }

  /** Bytes that may be sent for a body now. */
  credit(id) {
    const call = this.#calls.get(id);
    return call?.sending ? call.sendCredit : 0;
  }

  isOpen(id) {
    return this.#calls.has(id);
  }

  data(id, body, end = false) {
    const call = this.#calls.get(id);
    this.#require(call?.sending, `call ${id} sends no body`);
    this.#require(body.length <= call.sendCredit, `call ${id} has no credit for ${body.length} bytes`);
    this.#check(body, []);
    this.#put({ type: "Data", id, body, end });
    call.sendCredit -= body.length;
    if (end) {
      call.sending = false;
      if (!call.ours) this.#forget(id);
    }
  }

  /** Gives a call of ours up. */
  cancel(id, code = CODE.CALL_CANCELLED) {
    if (!this.#calls.get(id)?.ours) return;
    this.#forget(id);
    this.#put({ type: "Cancel", id, code });
  }

  /** Answers a call of the server. */
  reply(id, { status = 0, headers = [], body, more = false }) {
    const call = this.#calls.get(id);
    this.#require(call && !call.ours && !call.answered, `call ${id} cannot be answered`);
    this.#check(body, headers);
    this.#put({ type: "Reply", id, status, headers, body, more });
    call.answered = true;
    call.sending = more;
    call.sendCredit -= body?.length ?? 0;
    if (!more) this.#forget(id);
  }

  fail(id, code, reason = "", maybeDelivered = false) {
    const call = this.#calls.get(id);
    if (!call || call.ours) return;
    this.#put({ type: "Fail", id, code, reason: reason.slice(0, REASON_CHARS_MAX), maybe_delivered: maybeDelivered });
    this.#forget(id);
  }

  /** The application has used up body bytes of a call: the server may send as many more. */
  consume(id, size) {
    const call = this.#calls.get(id);
    if (!call || !(call.receiving || (call.ours && !call.answered))) return;
    call.consumed += size;
    if (call.consumed >= CREDIT_BYTES / 2) {
      this.#put({ type: "Credit", id, size: call.consumed });
      call.receiveCredit += call.consumed;
      call.consumed = 0;
    }
  }

  /** Confirms pushes; those confirmed before are left out. */
  ack(seqs) {
    const fresh = seqs.filter((seq) => this.#unacked.delete(seq));
    if (fresh.length && this.state !== "closed") this.#put({ type: "Ack", seqs: fresh });
  }

  /** Asks for a sign of life, unless one is asked for already. */
  ping(now) {
    if ((this.state !== "open" && this.state !== "draining") || this.#ping) return;
    this.#ping = { nonce: Math.floor(now), at: now };
    this.#put({ type: "Ping", nonce: this.#ping.nonce });
    this.#confirm();
  }

  close(code = CODE.OK, reason = "") {
    if (this.state === "closed") return;
    if (this.state !== "detached") this.#put({ type: "Close", code, reason });
    this.#end(code, reason);
  }

  // -- in --------------------------------------------------------------------------------------------------------

  /** Takes bytes of the server. `events` has what happened; a violation ends the session with a CLOSE to be sent. */
  receive(bytes, now) {
    if (this.state === "closed" || this.state === "detached") return;
    this.#in.feed(bytes);
    try {
      for (let payload; this.state !== "closed" && (payload = this.#in.next()) !== null; ) {
        this.#heard = now;
        this.#take(decode(payload), payload.length + 4, now);
      }
    } catch (error) {
      if (!(error instanceof Violation)) throw error;
      this.close(error.code, error.message.slice(0, REASON_CHARS_MAX));
    }
  }

  /** Gives and forgets what happened: `welcomed`, `replied`, `data`, `failed`, `credited`, `called`, `cancelled`,
   * `pushed`, `noticed`, `ponged`, `leaving`, `silent` (detach, or drop the connection: it is dead), `closed`. */
  events() {
    const events = this.#events;
    this.#events = [];
    return events;
  }

  // -- time ------------------------------------------------------------------------------------------------------

  /** When `tick` is due, null for never. */
  due() {
    if (this.state === "closed" || this.state === "detached") return null;
    if (this.#greetBy !== null) return this.#greetBy;
    return this.#ping ? this.#answerBy() : this.#heard + this.#heartbeatMs;
  }

  tick(now) {
    if (this.state === "closed" || this.state === "detached") return;
    if (this.#greetBy !== null) {
      if (now >= this.#greetBy) this.close(CODE.HELLO_TIMEOUT, "no complete greeting in time");
    } else if (this.#ping) {
      if (now >= this.#answerBy()) {
        this.#ping = null;
        this.#events.push({ event: "silent" });
      }
    } else if (now >= this.#heard + this.#heartbeatMs) this.ping(now);
  }

  #answerBy() {
    return Math.max(this.#ping.at, this.#heard) + HEARTBEAT_ANSWER_S * 1000;
  }

  // -- inside ----------------------------------------------------------------------------------------------------

  #put(message) {
    const frame = encode(message);
    const counted = COUNTED.has(message.type);
    if (this.#kept && counted) this.#kept.add(frame);
    // Before the WELCOME says where a session goes on, what it counts is kept alone: it goes then, once and in order.
    const waits = this.state === "detached" || (this.state === "greeting" && this.#token && counted);
    if (!waits) this.#out.push(frame);
  }

  #confirm() {
    if (this.#resumable && this.#kept.untold) this.#put({ type: "Received", count: this.#kept.tell() });
  }

  #require(condition, message) {
    if (!condition) throw new Error(message);
  }

  #check(body, headers) {
    this.#require((body?.length ?? 0) <= CHUNK_BYTES_MAX, `a chunk holds at most ${CHUNK_BYTES_MAX} bytes`);
    const fault = headersFault(headers);
    this.#require(!fault, fault);
  }

  #end(code, reason, more = {}) {
    this.state = "closed";
    this.#calls.clear();
    this.#greetBy = this.#ping = null;
    this.#events.push({ event: "closed", code, reason, retryAfterMs: null, byPeer: false, lost: false, ...more });
  }

  #forget(id) {
    if (!this.#calls.get(id).ours) this.#peerCalls--;
    this.#calls.delete(id);
  }

  #take(message, size, now) {
    if (!RECEIVED[this.state].has(message.type)) {
      throw new Violation(`${message.type} is not allowed in state ${this.state}`);
    }
    if (this.#kept && COUNTED.has(message.type) && this.#kept.take(size)) this.#confirm();
    this[`_take${message.type}`](message, now);
  }

  _takeWelcome(welcome) {
    if (welcome.version !== VERSION) throw new Violation(`version ${welcome.version} chosen`, CODE.VERSION_UNSUPPORTED);
    for (const span of [welcome.resume_window_s, welcome.heartbeat_s, welcome.return_spread_s]) {
      if (!(span >= 0 && span <= WIRE_SECONDS_MAX)) throw new Violation(`time span of ${span} s in the WELCOME`);
    }
    this.#greetBy = null;
    this.state = "open";
    if (this.#token) this.#goOn(welcome);
    this.#token = welcome.resume;
    this.#capabilities = new Set(welcome.capabilities.filter((name) => this.#offered.includes(name)));
    this.#resumable = this.#capabilities.has("resume") && this.#token !== "";
    if (!this.#capabilities.has("resume")) this.#kept = null;
    if (welcome.heartbeat_s > 0) this.#heartbeatMs = Math.min(this.#heartbeatMs, welcome.heartbeat_s * 1000);
    this.#events.push({ event: "welcomed", welcome });
  }

  /** The answer to a HELLO with which a session was to go on. */
  #goOn(welcome) {
    const again = welcome.resumed ? this.#kept.after(welcome.received) : null;
    if (welcome.resumed && again === null) throw new Violation(`${welcome.received} frames received, says the WELCOME`);
    if (again !== null) {
      this.#kept.confirmed(welcome.received);
      this.#kept.tell();
      this.#out.push(...again);
      return;
    }
    for (const [id, call] of this.#calls) {
      const lost = { event: "failed", id, code: CODE.OK, reason: "the session was lost", retryAfterMs: null };
      if (call.ours) this.#events.push({ ...lost, maybeDelivered: true });
      else this.#events.push({ event: "cancelled", id });
    }
    this.#calls.clear();
    this.#unacked.clear();
    this.#kept = new Kept();
    this.#nextCall = 1;
    this.#peerCall = this.#peerCalls = this.#pushed = 0;
  }

  _takeReceived({ count }) {
    if (!this.#capabilities.has("resume")) throw new Violation("confirmation without the capability");
    if (!this.#kept.confirmed(count)) throw new Violation(`confirmation of ${count} frames, more than were sent`);
  }

  _takeClose(close) {
    this.#end(close.code, close.reason.slice(0, REASON_CHARS_MAX), {
      retryAfterMs: close.retry_after_ms === null ? null : Math.max(0, Number(close.retry_after_ms)), byPeer: true,
    });
  }

  _takeGoAway(going) {
    this.state = "draining";
    this.#resumable = false;
    const { code, reason } = going;
    for (const [id, call] of this.#calls) {
      if (!call.ours || id <= going.last_call) continue;
      this.#forget(id);
      this.#events.push({ event: "failed", id, code, reason, retryAfterMs: null, maybeDelivered: call.answered });
    }
    this.#events.push({ event: "leaving", code, reason, spreadMs: Math.max(0, Number(going.spread_ms)) });
  }

  _takeCall(call) {
    if (call.id % 2 !== 0 || call.id <= this.#peerCall) throw new Violation(`call id ${call.id} after ${this.#peerCall}`);
    checkReceived(call);
    this.#peerCall = call.id;
    const entry = newCall(false, false, call.more);
    entry.receiveCredit -= call.body.length;
    this.#calls.set(call.id, entry);
    this.#peerCalls++;
    if (this.state === "draining") this.fail(call.id, CODE.GOING_AWAY, "this connection takes no new calls");
    else if (this.#peerCalls > CALLS_IN_FLIGHT_MAX) this.fail(call.id, CODE.CALL_TOO_MANY, "too many calls are open");
    else this.#events.push({ event: "called", call });
  }

  _takeReply(reply) {
    checkReceived(reply);
    const call = this.#known(reply.id, true);
    if (!call) return;
    if (call.answered) throw new Violation(`second reply to call ${reply.id}`);
    call.answered = true;
    call.receiving = reply.more;
    this.#spend(reply.id, call, reply.body.length);
    if (!reply.more) this.#forget(reply.id);
    this.#events.push({ event: "replied", reply });
  }

  _takeData(data) {
    if (data.body.length > CHUNK_BYTES_MAX) throw new Violation("chunk too large", CODE.FRAME_TOO_LARGE);
    const fault = headersFault(data.trailers);
    if (fault) throw new Violation(fault);
    const call = this.#known(data.id);
    if (!call) return;
    if (!call.receiving || (call.ours && !call.answered)) throw new Violation(`call ${data.id} expects no body bytes`);
    this.#spend(data.id, call, data.body.length);
    if (data.end) {
      call.receiving = false;
      if (call.ours) this.#forget(data.id);
    }
    this.#events.push({ event: "data", data });
  }

  _takeFail(fail) {
    if (!this.#known(fail.id, true)) return;
    this.#forget(fail.id);
    this.#events.push({
      event: "failed", id: fail.id, code: fail.code, reason: fail.reason.slice(0, REASON_CHARS_MAX),
      retryAfterMs: fail.retry_after_ms === null ? null : Math.max(0, Number(fail.retry_after_ms)),
      maybeDelivered: fail.maybe_delivered,
    });
  }

  _takeCancel(cancel) {
    if (!this.#known(cancel.id, false)) return;
    this.#forget(cancel.id);
    this.#events.push({ event: "cancelled", id: cancel.id });
  }

  _takeCredit(credit) {
    const call = this.#known(credit.id);
    if (credit.size < 1) throw new Violation(`credit of ${credit.size} bytes`, CODE.FLOW_CONTROL);
    if (!call || (!call.sending && call.ours)) return;
    call.sendCredit += Number(credit.size);
    if (call.sendCredit > CREDIT_WINDOW_BYTES_MAX) throw new Violation("credit overflows", CODE.FLOW_CONTROL);
    if (call.sending) this.#events.push({ event: "credited", id: credit.id });
  }

  _takePush(push) {
    if (push.seq !== this.#pushed + 1) throw new Violation(`push ${push.seq} after ${this.#pushed}`);
    if (push.body.length > PUSH_BODY_BYTES_MAX) throw new Violation("push too large", CODE.FRAME_TOO_LARGE);
    if (this.#unacked.size >= PUSHES_UNACKED_MAX) throw new Violation("too many pushes unacknowledged", CODE.FLOW_CONTROL);
    const fault = headersFault(push.headers);
    if (fault) throw new Violation(fault);
    this.#pushed = push.seq;
    this.#unacked.add(push.seq);
    this.#events.push({ event: "pushed", push });
  }

  _takeNotice({ version, hosts }) {
    if (!this.#capabilities.has("plan")) throw new Violation("a notice without the capability");
    if (version < 0 || typeof version === "bigint" || hosts.length > PLAN_HOSTS_MAX) throw new Violation("notice out of bounds");
    this.#events.push({ event: "noticed", version, hosts });
  }

  _takePing({ nonce }) {
    this.#put({ type: "Pong", nonce });
    this.#confirm();
  }

  _takePong({ nonce }, now) {
    if (this.#ping?.nonce !== nonce) return;
    this.#events.push({ event: "ponged", rttMs: Math.max(0, now - this.#ping.at) });
    this.#ping = null;
  }

  /** Finds the call a message is about; undefined where it has ended; an id never used is a violation. */
  #known(id, ours) {
    const mine = id % 2 !== 0;
    if (typeof id === "bigint" || id < 1 || (ours !== undefined && mine !== ours)) {
      throw new Violation(`message about call ${id}, which is not of the right side`);
    }
    if (mine ? id >= this.#nextCall : id > this.#peerCall) {
      throw new Violation(`message about call ${id}, which was never opened`);
    }
    return this.#calls.get(id);
  }

  #spend(id, call, size) {
    if (size > call.receiveCredit) throw new Violation(`call ${id}: ${size} bytes without credit`, CODE.FLOW_CONTROL);
    call.receiveCredit -= size;
  }
}

function newCall(ours, sending, receiving) {
  return { ours, sending, receiving, answered: false, sendCredit: CREDIT_BYTES, receiveCredit: CREDIT_BYTES, consumed: 0 };
}

function headersFault(headers) {
  if (headers.length > CALL_HEADERS_MAX) return `${headers.length} headers, at most ${CALL_HEADERS_MAX}`;
  const size = headers.reduce((sum, [name, value]) => sum + name.length + value.length, 0);
  return size > CALL_HEADER_CHARS_MAX ? `headers of ${size} characters, at most ${CALL_HEADER_CHARS_MAX}` : "";
}

function checkReceived({ id, body, headers }) {
  if (typeof id === "bigint") throw new Violation(`call id ${id}`);
  if (body.length > CHUNK_BYTES_MAX) throw new Violation(`call ${id}: chunk too large`, CODE.FRAME_TOO_LARGE);
  const fault = headersFault(headers);
  if (fault) throw new Violation(fault);
}
