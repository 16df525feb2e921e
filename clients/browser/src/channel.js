// The long connection of a page over time: opened when wanted, shared by all calls, reopened after losses.

import { NO_BYTES, Signal, bytesOf, joined } from "./bytes.js";
import { ChannelError, action } from "./errors.js";
import { CALLS_WAITING_MAX, CALL_DEADLINE_S, PUSH_IDS_KEPT } from "./limits.js";
import { Call, Link } from "./link.js";
import { CODE } from "./machine.js";
import { Reconnect } from "./reconnect.js";

const BODILESS = new Set([101, 204, 205, 304]);

/** The answer to a call. */
export class Reply {
  constructor(status, headers, body) {
    this.status = status;
    this.headers = headers;
    this.body = body;
  }

  text() {
    return new TextDecoder().decode(this.body);
  }

  json() {
    return JSON.parse(this.text());
  }
}

export class Channel {
  /** Called with each push `{id, topic, headers, body}`; it is confirmed once what this gives is resolved. */
  onpush = null;
  /** Called with `connecting`, `open`, `waiting`, `stopped` or `closed`, and the error where there is one. */
  onstate = null;
  /** Called with each notice `{version, hosts}` of a changed plan; asked for only where it is set before `open`. */
  onnotice = null;

  #options;
  #state = "closed";
  #wanted = false;
  #link = null;
  #leaving = new Set();
  #reconnect = new Reconnect();
  #room = new Signal();
  #waiting = 0;
  #methods = new Map();
  #seen = new Map();
  #again = null;
  #stopped = null;
  #online = () => this.networkChanged();

  /**
   * @param {object} options
   * @param {string} options.url `wss://GATEWAY/PATH`
   * @param {string} options.app application id
   * @param {string | (() => string | Promise<string>)} [options.token] device token, or what gives one; asked anew for
   *   each connection
   * @param {string} [options.unit] unit of the user
   * @param {string} [options.client] name and version of the app, for statistics
   */
  constructor(options) {
    this.#options = { token: "", unit: "", client: "stormline-browser/1", ...options };
  }

  get state() {
    return this.#state;
  }

  /** Opens the connection and keeps it from now on; gives a promise of the first session. */
  async open() {
    if (!this.#wanted) {
      this.#wanted = true;
      globalThis.addEventListener?.("online", this.#online);
      this.#connect();
    }
    while (this.#state !== "open") {
      if (this.#stopped) throw this.#stopped;
      if (!this.#wanted) throw new ChannelError("the channel was closed");
      await this.#room.wait();
    }
    return this.#link.welcome;
  }

  /** Says good-bye; calls under way fail. */
  close() {
    this.#wanted = false;
    globalThis.removeEventListener?.("online", this.#online);
    clearTimeout(this.#again);
    for (const link of [...this.#leaving, this.#link]) link?.close();
    this.#tell("closed");
  }

  /** The network is another one, or a new token is there: try at once, or ask for a sign of life. */
  networkChanged() {
    this.#reconnect.reset();
    this.#stopped = null;
    if (this.#state === "open") this.#link.check();
    else if (this.#wanted && this.#state !== "connecting") this.#connect();
  }

  /** Answers the server's calls of `method`: `handler({method, headers, body, signal})` gives bytes, or a value that is
   * sent as JSON. */
  serve(method, handler) {
    this.#methods.set(method, handler);
  }

  /** Calls a business service: `(await channel.call("orders.create", {item: 7})).json()`.
   *
   * A body that is no `Uint8Array` is sent as JSON. Throws `ChannelError`, or the reason of `signal`. */
  async call(method, body = NO_BYTES, { headers = [], deadlineMs = CALL_DEADLINE_S * 1000, signal } = {}) {
    const call = new Call();
    const leave = this.#bounded(call, deadlineMs, signal);
    try {
      await this.#send(call, { gate: "rpc", method, headers }, bytesOf(body), deadlineMs);
      const { status, headers: answered } = await call.head();
      const chunks = [];
      for (let chunk; (chunk = await call.chunk()) !== null; ) chunks.push(chunk);
      return new Reply(status, answered, joined(chunks));
    } finally {
      leave();
    }
  }

  /** As `fetch`, through the gateway's gate for HTTP. The body of the answer streams. */
  async fetch(input, { deadlineMs = CALL_DEADLINE_S * 1000, ...init } = {}) {
    const request = new Request(input, init);
    const bytes = new Uint8Array(await request.arrayBuffer());
    const call = new Call();
    const leave = this.#bounded(call, deadlineMs, request.signal);
    try {
      const { method, url: target } = request;
      await this.#send(call, { gate: "api", method, target, headers: [...request.headers] }, bytes, deadlineMs);
      const { status, headers } = await call.head();
      if (method !== "HEAD" && !BODILESS.has(status)) return new Response(stream(call, leave), { status, headers });
      leave();
      return new Response(null, { status, headers });
    } catch (error) {
      leave();
      throw error;
    }
  }

  /** Ends a call with its deadline or its signal; gives what takes both away, and the call with them. */
  #bounded(call, deadlineMs, signal) {
    const late = () => {
      call.fail(new ChannelError("no answer in time", { code: CODE.CALL_DEADLINE, maybeDelivered: call.sent }));
      this.#room.notify();
      if (call.sent) this.#link?.check(); // an answer was due: is anybody there?
    };
    const aborted = () => {
      call.fail(signal.reason);
      this.#room.notify();
    };
    const timer = setTimeout(late, deadlineMs);
    signal?.addEventListener("abort", aborted);
    if (signal?.aborted) aborted();
    return () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", aborted);
      call.leave();
    };
  }

  /** Sends a call as soon as a connection has room for it; HELLO need not be answered yet. */
  async #send(call, head, bytes, deadlineMs) {
    const endsAt = performance.now() + deadlineMs;
    if (this.#waiting >= CALLS_WAITING_MAX) throw new ChannelError("too many calls wait for the connection");
    this.#waiting++;
    if (this.#state === "waiting") this.#return(); // sooner than for nobody
    try {
      while (!this.#link?.mayCall && !call.ended) {
        if (this.#stopped) throw this.#stopped;
        if (!this.#wanted) throw new ChannelError("the channel is not open");
        await this.#room.wait();
      }
    } finally {
      this.#waiting--;
    }
    if (call.ended) await call.head(); // throws why
    this.#link.open(call, head, bytes, Math.max(0, Math.round(endsAt - performance.now())));
  }

  #connect() {
    clearTimeout(this.#again);
    const { url, token, app, unit, client } = this.#options;
    const hello = async () => ({
      app, unit, client,
      token: await (typeof token === "function" ? token() : token),
      capabilities: this.onnotice ? ["plan"] : [],
    });
    this.#tell("connecting");
    if (this.#link) this.#link.connect(); // a session that waits for its next connection
    else this.#link = new Link(url, hello, this);
  }

  #tell(state, error = null) {
    this.#state = state;
    this.#room.notify();
    this.onstate?.(state, error);
  }

  #return() {
    clearTimeout(this.#again);
    if (!this.#wanted) return;
    const calls = this.#waiting > 0 || (this.#link !== null && !this.#link.idle);
    this.#again = setTimeout(() => this.#connect(), this.#reconnect.pause(performance.now(), calls));
  }

  // -- what a link tells -------------------------------------------------------------------------------------------

  linkRoom(link) {
    this.#room.notify();
    if (this.#leaving.has(link) && link.idle) link.close();
  }

  linkWelcomed(link) {
    this.#reconnect.welcomed(performance.now(), link.welcome.return_spread_s * 1000);
    this.#tell("open");
  }

  linkLeaving(link, spreadMs) {
    if (this.#link !== link) return;
    this.#link = null;
    this.#leaving.add(link);
    this.#reconnect.leaving(performance.now(), Math.random(), spreadMs);
    this.#return();
    this.#tell("waiting");
    if (link.idle) link.close();
  }

  linkDetached(link) {
    if (this.#leaving.has(link)) {
      link.close();
      return;
    }
    if (this.#link !== link) return;
    const [now, chance] = [performance.now(), Math.random()];
    if (this.#state === "open") this.#reconnect.lost(now, chance);
    else this.#reconnect.failed(now, chance);
    this.#return();
    this.#tell("waiting");
  }

  linkEnded(link, { code, retryAfterMs, byPeer }, error) {
    if (this.#leaving.delete(link) || this.#link !== link) return;
    const [now, chance] = [performance.now(), Math.random()];
    this.#link = null;
    if (byPeer && action(code) === "stop") {
      this.#stopped = error;
      this.#tell("stopped", error);
      return;
    }
    if (link.welcome && !(byPeer && code !== CODE.OK)) this.#reconnect.lost(now, chance);
    else this.#reconnect.failed(now, chance, retryAfterMs);
    if (!this.#wanted) return;
    this.#return();
    this.#tell("waiting", error);
  }

  linkCalled(link, call) {
    const handler = call.gate === "rpc" ? this.#methods.get(call.method) : undefined;
    if (handler) link.answer(call, handler);
    else link.refuse(call, CODE.CALL_NOT_FOUND, "this device serves no such call");
  }

  async linkPushed({ id, topic, headers, body }, ack) {
    const seen = this.#seen.get(id);
    if (seen) {
      if (seen.acked) ack();
      else seen.ack = ack; // it came again before it was taken over
      return;
    }
    if (!this.onpush) return; // stays unconfirmed, so its sender knows
    const entry = { acked: false, ack };
    this.#seen.set(id, entry);
    if (this.#seen.size > PUSH_IDS_KEPT) this.#seen.delete(this.#seen.keys().next().value);
    try {
      await this.onpush({ id, topic, headers, body });
    } catch (error) {
      this.#seen.delete(id);
      console.error("stormline: a push was not taken over", error);
      return;
    }
    entry.acked = true;
    entry.ack();
  }

  linkNoticed(notice) {
    this.onnotice?.(notice);
  }
}

function stream(call, leave) {
  return new ReadableStream({
    async pull(controller) {
      try {
        const chunk = await call.chunk();
        if (chunk !== null) controller.enqueue(chunk);
        else {
          leave();
          controller.close();
        }
      } catch (error) {
        leave();
        controller.error(error);
      }
    },
    cancel: leave,
  });
}
