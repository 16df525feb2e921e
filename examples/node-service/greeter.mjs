// A business service in Node: answers `greeter.hello`, and gives up `greeter.slow` when its caller goes away.
//
//     npm ci && NATS_URL=... NATS_PASSWORD=... node greeter.mjs
//
// The convention it keeps is docs/howto/write-an-rpc-service.md; nothing here is of stormline.

import { connect, headers, StringCodec } from "nats";

const text = StringCodec();
const client = await connect({
  servers: process.env.NATS_URL,
  user: process.env.NATS_USER ?? "biz",
  pass: process.env.NATS_PASSWORD,
  maxReconnectAttempts: -1,
});
const service = await client.services.add({ name: "greeter", version: "1.2.0", queue: "greeter" });

function refuse(request, code, reason) {
  const said = headers();
  said.set("Nats-Service-Error-Code", String(code));
  said.set("Nats-Service-Error", reason);
  request.respond(undefined, { headers: said });
}

service.addEndpoint("hello", {
  subject: "rpc.greeter.hello",
  handler: (error, request) => {
    if (error) return;
    let name;
    try {
      name = JSON.parse(text.decode(request.data));
    } catch {}
    if (typeof name !== "string") return refuse(request, 400, "expected a name");
    const device = decodeURIComponent(request.headers.get("Stormline-Device"));
    request.respond(text.encode(JSON.stringify(`Hello ${name}, on device ${device}`)));
  },
});

const underWay = new Map(); // id of the call -> what stops it
client.subscribe("rpc.CANCEL.greeter.slow", {
  callback: (error, message) => error || underWay.get(text.decode(message.data))?.(),
});
let stopped = 0;
service.addEndpoint("slow", {
  subject: "rpc.greeter.slow",
  handler: (error, request) => {
    if (error) return;
    const id = request.headers.get("Stormline-Call");
    const waits_ms = Number(request.headers.get("Stormline-Deadline-Ms"));
    const end = (answer) => {
      clearTimeout(timer);
      underWay.delete(id);
      answer();
    };
    const timer = setTimeout(() => end(() => refuse(request, 504, "too late")), waits_ms);
    underWay.set(id, () => end(() => stopped++));
  },
});
service.addEndpoint("stopped", {
  subject: "rpc.greeter.stopped",
  handler: (error, request) => error || request.respond(text.encode(JSON.stringify(stopped))),
});
await client.flush();
console.log("answering");
