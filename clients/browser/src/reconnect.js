// When a lost or refused connection is tried again: exponential back-off with jitter, so that no herd comes back at once.

import { RECONNECT_FIRST_S, RECONNECT_MAX_S, RECONNECT_STABLE_S, RETRY_AFTER_MAX_S } from "./limits.js";

/** Times are milliseconds; `chance` is a draw from [0, 1). */
export class Reconnect {
  stopped = false;
  #failures = 0;
  #notBefore = 0;
  #standsSince = null;
  #slowUntil = 0;
  #spreadMs = 0;

  /** How long to wait before the next try; less where calls wait for it: they come at moments of their own. */
  pause(now, calls = false) {
    return Math.max(0, (calls ? this.#notBefore : Math.max(this.#notBefore, this.#slowUntil)) - now);
  }

  /** `spreadMs` is the server's advice: over which span to come back where it is gone without a word. */
  welcomed(now, spreadMs = 0) {
    this.#standsSince = now;
    this.#spreadMs = Math.min(spreadMs, RECONNECT_MAX_S * 1000);
    this.#notBefore = this.#slowUntil = 0;
  }

  /** A session that stood was lost; one that stood for a moment only counts as a failed try. */
  lost(now, chance) {
    if (!this.#stable(now)) {
      this.failed(now, chance);
      return;
    }
    this.#notBefore = now + RECONNECT_FIRST_S * 1000 * chance;
    this.#slowUntil = now + this.#spreadMs * chance;
  }

  /** The server asked us to come back within `spreadMs`. */
  leaving(now, chance, spreadMs) {
    if (!this.#stable(now)) this.failed(now, chance);
    this.#slowUntil = now + Math.min(spreadMs, RECONNECT_MAX_S * 1000) * chance;
  }

  failed(now, chance, retryAfterMs = 0) {
    const span = Math.min(RECONNECT_MAX_S, RECONNECT_FIRST_S * 2 ** Math.min(this.#failures, 16)) * 1000;
    const asked = Math.min(retryAfterMs ?? 0, RETRY_AFTER_MAX_S * 1000);
    this.#failures++;
    this.#standsSince = null;
    this.#notBefore = now + Math.max(span * (0.5 + 0.5 * chance), asked * (1 + 0.25 * chance));
    this.#slowUntil = now + this.#spreadMs * (0.5 + 0.5 * chance);
  }

  /** Something changed (token, network): try at once. */
  reset() {
    this.#failures = 0;
    this.#notBefore = this.#slowUntil = 0;
    this.stopped = false;
  }

  #stable(now) {
    const stable = this.#standsSince !== null && now - this.#standsSince >= RECONNECT_STABLE_S * 1000;
    this.#standsSince = null;
    if (stable) this.#failures = 0;
    return stable;
  }
}
