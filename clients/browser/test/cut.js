// A page whose connection is cut again and again: the session goes on, and everything arrives once.

import { Channel } from "../src/stormline.js";
import { act, equal, run, test, until } from "./run.js";

const { url, token } = await act("where");
const pushes = [];
const channel = new Channel({ url, app: "demo", token });
channel.onstate = (state) => {
  if (state === "waiting") channel.networkChanged(); // as a browser that says it is online: no back-off in a test
};
channel.onpush = ({ id }) => pushes.push(id);
const first = await channel.open();

test("a call under way gets its answer, and is done once", async () => {
  const held = channel.call("shop.held", "a");
  await act("begun", { name: '"a"' });
  await act("cut");
  await act("release");
  equal((await held).json(), "a");
  equal(await act("count", { name: '"a"' }), 1);
  equal((await channel.open()).session, first.session);
});
test("many calls through many cuts are done once each", async () => {
  const names = Array.from({ length: 40 }, (_, place) => `call-${place}`);
  const calls = names.map((name) => channel.call("shop.count", name, { deadlineMs: 30_000 }));
  for (let cuts = 0; cuts < 3; cuts++) {
    await act("cut");
    await until(() => channel.state === "open", "the session goes on");
  }
  equal((await Promise.all(calls)).map((answer) => answer.json()), names);
  for (const name of names) equal(await act("count", { name: JSON.stringify(name) }), 1, name);
});
test("a push sent while nothing is connected is shown once and confirmed", async () => {
  const pushing = act("push_while_cut", { id: "p-1", body: 1 });
  equal((await pushing).state, "acked");
  equal(pushes, ["p-1"]);
});
test("large bodies both ways go on where they were", async () => {
  const body = Uint8Array.from({ length: 600_000 }, (_, place) => place % 253);
  const echoed = channel.call("shop.echo", body, { deadlineMs: 30_000 });
  await act("cut");
  equal((await echoed).body, body);
});
test("it was one session all the time", async () => {
  equal((await channel.open()).session, first.session);
  channel.close();
});
await run();
