// Frames that the server has not confirmed, kept to be sent again where the session goes on over another connection.

import { KEPT_BYTES_MAX, KEPT_FRAMES_MAX, RECEIVED_EVERY_BYTES, RECEIVED_EVERY_FRAMES } from "./limits.js";

/** Messages that belong to the session; the others belong to one connection. */
export const COUNTED = new Set(["Call", "Data", "Reply", "Fail", "Cancel", "Credit", "Push", "Ack", "Notice"]);

/** Counts frames from 1 in each direction. */
export class Kept {
  received = 0;
  #frames = [];
  #before = 0; // frames of ours that are kept no more
  #size = 0;
  #told = 0;
  #untold = 0;

  get sent() {
    return this.#before + this.#frames.length;
  }

  add(frame) {
    this.#frames.push(frame);
    this.#size += frame.length;
    while (this.#size > KEPT_BYTES_MAX || this.#frames.length > KEPT_FRAMES_MAX) this.#drop(1);
  }

  /** Counts a frame that came; true where it is time to confirm. */
  take(size) {
    this.received++;
    this.#untold += size;
    return this.#untold >= RECEIVED_EVERY_BYTES || this.received - this.#told >= RECEIVED_EVERY_FRAMES;
  }

  get untold() {
    return this.received > this.#told;
  }

  /** Gives the count to confirm now. */
  tell() {
    this.#told = this.received;
    this.#untold = 0;
    return this.received;
  }

  /** The server has received so many; false where there never were. */
  confirmed(count) {
    if (!(count >= 0 && count <= this.sent)) return false;
    this.#drop(Math.max(0, count - this.#before));
    return true;
  }

  /** Gives the frames behind the first `count`, null where some of them are kept no more. */
  after(count) {
    return count >= this.#before && count <= this.sent ? this.#frames.slice(count - this.#before) : null;
  }

  #drop(count) {
    for (const frame of this.#frames.splice(0, count)) this.#size -= frame.length;
    this.#before += count;
  }
}
