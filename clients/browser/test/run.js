// Runs the tests of a page one after the other and tells the server that gave the page how they went.

const tests = [];

export function test(name, body) {
  tests.push([name, body]);
}

export function equal(got, wanted, what = "") {
  if (shown(got) !== shown(wanted)) throw new Error(`${what} ${shown(got)} instead of ${shown(wanted)}`);
}

export async function throws(body, matches) {
  try {
    await body();
  } catch (error) {
    if (!matches(error)) throw new Error(`threw ${error}`);
    return error;
  }
  throw new Error("threw nothing");
}

export async function run() {
  const results = [];
  for (const [name, body] of tests) {
    console.info(name);
    try {
      await body();
      results.push({ name, error: "" });
    } catch (error) {
      results.push({ name, error: `${error}\n${error?.stack ?? ""}` });
    }
  }
  await fetch("/results", { method: "POST", body: JSON.stringify(results) });
}

export function hexOf(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function bytesOf(hex) {
  return Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

function shown(value) {
  return JSON.stringify(value, (key, each) => {
    if (each instanceof Uint8Array) return { hex: hexOf(each) };
    return typeof each === "bigint" ? `${each}n` : each;
  });
}

/** Has the test that opened the page do something. */
export async function act(name, given = {}) {
  return (await fetch(`/act/${name}`, { method: "POST", body: JSON.stringify(given) })).json();
}

/** Waits until something holds. */
export async function until(holds, what, waitMs = 15_000) {
  const end = performance.now() + waitMs;
  while (!holds()) {
    if (performance.now() > end) throw new Error(`in vain: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}
