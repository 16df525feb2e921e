// The part of MessagePack that the wire uses, read and written by the type that a field must have.
//
// Strict as the protocol asks: text is `str` in UTF-8, binary is `bin`, an integer is never a float or a boolean; each
// legal length form is read. Integers beyond 2^53 are bigint.

/** What breaks the protocol; `code` is what CLOSE says. */
export class Violation extends Error {
  constructor(message, code = 402) {
    super(message);
    this.name = "Violation";
    this.code = code;
  }
}

const strictText = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const textBytes = new TextEncoder();
const EXT_BYTES = { 0xd4: 1, 0xd5: 2, 0xd6: 4, 0xd7: 8, 0xd8: 16 };

/** Reads one value after the other; each method throws `Violation` where the next value is of another type. */
export class Reader {
  #bytes;
  #view;
  #at = 0;

  constructor(bytes) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  get left() {
    return this.#bytes.length - this.#at;
  }

  get nextIsNil() {
    return this.left > 0 && this.#bytes[this.#at] === 0xc0;
  }

  nil() {
    if (this.#take(1) !== 0xc0) throw new Violation("nil expected");
    return null;
  }

  boolean() {
    const head = this.#take(1);
    if (head !== 0xc2 && head !== 0xc3) throw new Violation("boolean expected");
    return head === 0xc3;
  }

  integer() {
    return this.#integerOf(this.#take(1));
  }

  float() {
    const head = this.#take(1);
    if (head === 0xca) return this.#view.getFloat32(this.#skip(4));
    if (head === 0xcb) return this.#view.getFloat64(this.#skip(8));
    return Number(this.#integerOf(head));
  }

  text() {
    const head = this.#take(1);
    let size;
    if (head >= 0xa0 && head <= 0xbf) size = head & 0x1f;
    else if (head >= 0xd9 && head <= 0xdb) size = this.#take(1 << (head - 0xd9));
    else throw new Violation("text expected");
    const start = this.#skip(size);
    try {
      return strictText.decode(this.#bytes.subarray(start, start + size));
    } catch {
      throw new Violation("text that is not UTF-8");
    }
  }

  binary() {
    const head = this.#take(1);
    if (head < 0xc4 || head > 0xc6) throw new Violation("binary expected");
    const size = this.#take(1 << (head - 0xc4));
    const start = this.#skip(size);
    return this.#bytes.slice(start, start + size);
  }

  /** Gives the number of values that follow; never more than there are bytes. */
  array() {
    const head = this.#take(1);
    let size;
    if (head >= 0x90 && head <= 0x9f) size = head & 0x0f;
    else if (head === 0xdc) size = this.#take(2);
    else if (head === 0xdd) size = this.#take(4);
    else throw new Violation("array expected");
    if (size > this.left) throw new Violation("array longer than its bytes");
    return size;
  }

  /** Passes over one value of any type, however deep. */
  skip() {
    for (let values = 1; values > 0; values--) {
      const head = this.#take(1);
      if (head < 0x80 || head >= 0xe0 || head === 0xc0 || head === 0xc2 || head === 0xc3) continue;
      else if (head < 0x90) values += 2 * (head & 0x0f);
      else if (head < 0xa0) values += head & 0x0f;
      else if (head < 0xc0) this.#skip(head & 0x1f);
      else if (head >= 0xc4 && head <= 0xc6) this.#skip(this.#take(1 << (head - 0xc4)));
      else if (head >= 0xc7 && head <= 0xc9) this.#skip(this.#take(1 << (head - 0xc7)) + 1);
      else if (head === 0xca || head === 0xcb) this.#skip(head === 0xca ? 4 : 8);
      else if (head >= 0xcc && head <= 0xd3) this.#skip(1 << (head & 3));
      else if (head in EXT_BYTES) this.#skip(EXT_BYTES[head] + 1);
      else if (head >= 0xd9 && head <= 0xdb) this.#skip(this.#take(1 << (head - 0xd9)));
      else if (head === 0xdc || head === 0xdd) values += this.#take(2 << (head - 0xdc));
      else if (head === 0xde || head === 0xdf) values += 2 * this.#take(2 << (head - 0xde));
      else throw new Violation("no value begins so");
      if (values - 1 > this.left) throw new Violation("more values than bytes");
    }
  }

  #integerOf(head) {
    if (head < 0x80) return head;
    if (head >= 0xe0) return head - 0x100;
    switch (head) {
      case 0xcc: return this.#take(1);
      case 0xcd: return this.#take(2);
      case 0xce: return this.#take(4);
      case 0xcf: return small(this.#view.getBigUint64(this.#skip(8)));
      case 0xd0: return this.#view.getInt8(this.#skip(1));
      case 0xd1: return this.#view.getInt16(this.#skip(2));
      case 0xd2: return this.#view.getInt32(this.#skip(4));
      case 0xd3: return small(this.#view.getBigInt64(this.#skip(8)));
      default: throw new Violation("integer expected");
    }
  }

  #take(size) {
    const at = this.#skip(size);
    return size === 1 ? this.#bytes[at] : size === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  #skip(size) {
    if (size > this.left) throw new Violation("cut short");
    const at = this.#at;
    this.#at += size;
    return at;
  }
}

function small(value) {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/** Writes one value after the other, each in its shortest form. */
export class Writer {
  #bytes = new Uint8Array(256);
  #view = new DataView(this.#bytes.buffer);
  #at = 0;

  /** Keeps `size` bytes free and gives their place. */
  room(size) {
    const at = this.#at;
    if (at + size > this.#bytes.length) {
      const larger = new Uint8Array(Math.max(2 * this.#bytes.length, at + size));
      larger.set(this.#bytes);
      this.#bytes = larger;
      this.#view = new DataView(larger.buffer);
    }
    this.#at += size;
    return at;
  }

  get size() {
    return this.#at;
  }

  uint32At(at, value) {
    this.#view.setUint32(at, value);
  }

  taken() {
    return this.#bytes.slice(0, this.#at);
  }

  nil() {
    this.#byte(0xc0);
  }

  boolean(value) {
    this.#byte(value ? 0xc3 : 0xc2);
  }

  integer(value) {
    if (typeof value !== "bigint" && !Number.isSafeInteger(value)) throw new TypeError(`no integer: ${value}`);
    if (value >= 0) {
      if (value < 0x80) this.#byte(Number(value));
      else if (value < 0x100) this.#sized(0xcc, 1, value);
      else if (value < 0x10000) this.#sized(0xcd, 2, value);
      else if (value < 0x100000000) this.#sized(0xce, 4, value);
      else if (value < 2n ** 64n) this.#sized(0xcf, 8, value);
      else throw new TypeError(`integer too large: ${value}`);
    } else if (value >= -0x20) this.#byte(Number(value) + 0x100);
    else if (value >= -0x80) this.#sized(0xd0, 1, value);
    else if (value >= -0x8000) this.#sized(0xd1, 2, value);
    else if (value >= -0x80000000) this.#sized(0xd2, 4, value);
    else if (value >= -(2n ** 63n)) this.#sized(0xd3, 8, value);
    else throw new TypeError(`integer too small: ${value}`);
  }

  float(value) {
    this.#byte(0xcb);
    const at = this.room(8);
    this.#view.setFloat64(at, value);
  }

  text(value) {
    if (typeof value !== "string" || /[\uD800-\uDFFF]/u.test(value)) throw new TypeError("text expected, whole characters");
    const bytes = textBytes.encode(value);
    if (bytes.length < 0x20) this.#byte(0xa0 | bytes.length);
    else if (bytes.length < 0x100) this.#sized(0xd9, 1, bytes.length);
    else if (bytes.length < 0x10000) this.#sized(0xda, 2, bytes.length);
    else this.#sized(0xdb, 4, bytes.length);
    this.#raw(bytes);
  }

  binary(bytes) {
    if (!(bytes instanceof Uint8Array)) throw new TypeError("bytes expected");
    if (bytes.length < 0x100) this.#sized(0xc4, 1, bytes.length);
    else if (bytes.length < 0x10000) this.#sized(0xc5, 2, bytes.length);
    else this.#sized(0xc6, 4, bytes.length);
    this.#raw(bytes);
  }

  array(size) {
    if (size < 0x10) this.#byte(0x90 | size);
    else if (size < 0x10000) this.#sized(0xdc, 2, size);
    else this.#sized(0xdd, 4, size);
  }

  #byte(value) {
    const at = this.room(1);
    this.#bytes[at] = value;
  }

  /** Negative numbers come out as two's complement: the setters take them modulo their size. */
  #sized(head, size, value) {
    this.#byte(head);
    const at = this.room(size);
    if (size === 1) this.#view.setUint8(at, Number(value));
    else if (size === 2) this.#view.setUint16(at, Number(value));
    else if (size === 4) this.#view.setUint32(at, Number(value));
    else this.#view.setBigUint64(at, BigInt(value));
  }

  #raw(bytes) {
    const at = this.room(bytes.length);
    this.#bytes.set(bytes, at);
  }
}
