// A page on a real gateway.

import { CODE, Channel, ChannelError } from "../src/stormline.js";
import { act, equal, run, test, throws, until } from "./run.js";

const { url, token, upstream, silent } = await act("where");
const states = [];
const pushes = [];
const channel = new Channel({ url, app: "demo", token: async () => token });
channel.onstate = (state) => states.push(state);
channel.onpush = async (push) => {
  if (push.topic === "refused") throw new Error("not now");
  pushes.push(push);
};
const failed = (code, maybeDelivered) => (error) =>
  error instanceof ChannelError && error.code === code && error.maybeDelivered === maybeDelivered;
const bytes = (size) => Uint8Array.from({ length: size }, (_, place) => place % 251);

test("a call made before the connection stands goes with the greeting", async () => {
  const opening = channel.open();
  equal((await channel.call("shop.echo", { item: 7 })).json(), { item: 7 });
  equal((await opening).device, "page");
  equal(states, ["connecting", "open"]);
});
test("many calls at once have each its own answer", async () => {
  const sizes = Array.from({ length: 60 }, (_, place) => place * 2_000);
  const answers = await Promise.all(sizes.map((size) => channel.call("shop.echo", bytes(size))));
  for (const [place, { body }] of answers.entries()) equal(body.length, sizes[place]);
  equal(answers[59].body, bytes(118_000));
});
test("more calls than the gateway takes at once wait their turn", async () => {
  const answers = await Promise.all(Array.from({ length: 400 }, (_, place) => channel.call("shop.echo", place)));
  equal(answers.map((answer) => answer.json()), Array.from({ length: 400 }, (_, place) => place));
});
test("a service that does not exist", async () => {
  await throws(() => channel.call("nobody.asks"), (error) => error.action === "call" && !error.maybeDelivered);
});
test("a deadline ends its call alone, and the service hears of it", async () => {
  const slow = throws(() => channel.call("shop.slow", 1, { deadlineMs: 300 }), failed(CODE.CALL_DEADLINE, true));
  equal((await channel.call("shop.echo", 2)).json(), 2);
  await slow;
});
test("a signal ends its call", async () => {
  const abort = new AbortController();
  const slow = throws(() => channel.call("shop.slow", 1, { signal: abort.signal }), (error) => error === "enough");
  abort.abort("enough");
  await slow;
  await throws(() => channel.call("shop.echo", 1, { signal: abort.signal }), (error) => error === "enough");
});
test("HTTP through the gateway, both bodies of a megabyte", async () => {
  const answer = await channel.fetch(`${upstream}/echo`, { method: "POST", body: bytes(1_000_000), headers: { "x-a": "1" } });
  equal([answer.status, answer.headers.get("x-seen")], [200, "1"]);
  equal(new Uint8Array(await answer.arrayBuffer()).length, 1_000_000);
});
test("an answer left in the middle costs nobody anything", async () => {
  const answer = await channel.fetch(`${upstream}/endless`);
  const reader = answer.body.getReader();
  let size = 0;
  while (size < 500_000) size += (await reader.read()).value.length;
  await reader.cancel();
  equal((await channel.call("shop.echo", 3)).json(), 3);
});
test("an answer without a body", async () => {
  const answer = await channel.fetch(`${upstream}/nothing`);
  equal([answer.status, await answer.text()], [204, ""]);
});
test("a push is shown once and confirmed each time", async () => {
  for (const wanted of ["acked", "acked"]) {
    equal((await act("push", { id: "p-1", topic: "news", body: { a: 1 } })).state, wanted);
  }
  equal(pushes.map(({ id, topic, body }) => [id, topic, new TextDecoder().decode(body)]), [["p-1", "news", '{"a":1}']]);
});
test("a push that the page does not take over is not confirmed", async () => {
  equal((await act("push", { id: "p-2", topic: "refused", body: 1, ttl_s: 1 })).state, "unconfirmed");
});
test("a gateway that restarts is found again; what was under way says so", async () => {
  const slow = throws(() => channel.call("shop.slow", 1), (error) => error instanceof ChannelError && error.maybeDelivered);
  await act("restart");
  await slow;
  equal((await channel.call("shop.echo", 4, { deadlineMs: 20_000 })).json(), 4);
  equal(channel.state, "open");
});
test("a token that is not genuine stops the channel, and a call says why", async () => {
  const other = new Channel({ url, app: "demo", token: token.slice(0, -4) + "AAAA" });
  await throws(() => other.open(), (error) => error.code === 400 && !error.maybeDelivered);
  equal(other.state, "stopped");
  await throws(() => other.call("shop.echo", 1), (error) => error.code === 400 && !error.maybeDelivered);
  other.close();
});
test("where nobody answers, a call waits for its deadline and was not delivered", async () => {
  const other = new Channel({ url: silent, app: "demo", token });
  other.open().catch(() => {});
  await throws(() => other.call("shop.echo", 1, { deadlineMs: 700 }), failed(CODE.CALL_DEADLINE, false));
  other.close();
});
test("a newer session of the device ends this one for good", async () => {
  const newer = new Channel({ url, app: "demo", token });
  await newer.open();
  await until(() => channel.state === "stopped", "the older channel stops");
  equal((await newer.call("shop.echo", 5)).json(), 5);
  newer.close();
});
await run();
