// Bounds of the protocol (docs/reference/protocol.md, section 12) and of this client.

export const FRAME_BYTES_MAX = 65536;
export const CHUNK_BYTES_MAX = 16384;
export const CREDIT_BYTES = 262144;
export const CREDIT_WINDOW_BYTES_MAX = 2147483647;
export const CALLS_IN_FLIGHT_MAX = 256;
export const CALL_HEADERS_MAX = 128;
export const CALL_HEADER_CHARS_MAX = 32768;
export const PUSH_BODY_BYTES_MAX = 32768;
export const PUSHES_UNACKED_MAX = 64;
export const REASON_CHARS_MAX = 256;
export const PLAN_HOSTS_MAX = 100;
export const WIRE_SECONDS_MAX = 31536000;
export const HELLO_TIMEOUT_S = 5;
export const HEARTBEAT_S = 60;
export const HEARTBEAT_ANSWER_S = 8;

/** Calls that wait for a connection, or for one of the 256 places on it; more fail at once. */
export const CALLS_WAITING_MAX = 1024;
/** Time a call has where its caller names none. */
export const CALL_DEADLINE_S = 15;
/** Bytes in the buffer of the browser beyond which a body waits. */
export const BUFFERED_BYTES_MAX = 262144;
/** Span of the first return after a loss, and of the longest. */
export const RECONNECT_FIRST_S = 1;
export const RECONNECT_MAX_S = 60;
/** A session that stood as long makes the failures before it forgotten. */
export const RECONNECT_STABLE_S = 10;
/** Longest pause that a server is believed to ask for. */
export const RETRY_AFTER_MAX_S = 3600;
/** Ids of messages remembered, so that one that comes again is not shown again. */
export const PUSH_IDS_KEPT = 1024;
/** A WebSocket tells nobody when its buffer drains, so a sender looks again after this. */
export const BUFFERED_LOOK_MS = 10;

/** Frames and bytes of a session after which their receiver confirms them. */
export const RECEIVED_EVERY_FRAMES = 32;
export const RECEIVED_EVERY_BYTES = 32768;
/** Bytes and frames kept until the server confirms them; beyond, the oldest are dropped and the session ends with its
 * connection. */
export const KEPT_BYTES_MAX = 1048576;
export const KEPT_FRAMES_MAX = 4096;
