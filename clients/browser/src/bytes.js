export const NO_BYTES = new Uint8Array(0);

const utf8 = new TextEncoder();

/** Bytes as they are; anything else as JSON. */
export function bytesOf(value) {
  return value instanceof Uint8Array ? value : utf8.encode(JSON.stringify(value ?? null));
}

export function joined(chunks) {
  if (chunks.length === 1) return chunks[0];
  const whole = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
  let at = 0;
  for (const chunk of chunks) {
    whole.set(chunk, at);
    at += chunk.length;
  }
  return whole;
}

/** Something that several wait for, again and again. */
export class Signal {
  #wakes = [];

  notify() {
    for (const wake of this.#wakes.splice(0)) wake();
  }

  wait() {
    return new Promise((resolve) => this.#wakes.push(resolve));
  }
}
