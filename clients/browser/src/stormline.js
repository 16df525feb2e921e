// stormline in a page: `import { Channel } from "./stormline.js"`.

export { Channel, Reply } from "./channel.js";
export { ChannelError, action } from "./errors.js";
export { CODE, Machine } from "./machine.js";
export { Frames, NAMES, decode, encode } from "./messages.js";
export { Violation } from "./msgpack.js";
