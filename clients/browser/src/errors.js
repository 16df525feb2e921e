/** What the hundred of a code asks for (docs/reference/codes.md). */
export function action(code) {
  if (code === 0) return "none";
  return { 1: "retry", 2: "move", 3: "renew", 5: "call" }[Math.floor(code / 100)] ?? "stop";
}

/** Anything that went wrong. `code` is the protocol's where it has one, 0 else.
 *
 * `maybeDelivered` is false only where the work was certainly not done, so that it may be done again. */
export class ChannelError extends Error {
  constructor(message, { code = 0, maybeDelivered = false, retryAfterMs = null } = {}) {
    super(message);
    this.name = "ChannelError";
    this.code = code;
    this.action = action(code);
    this.maybeDelivered = maybeDelivered;
    this.retryAfterMs = retryAfterMs;
  }
}
