// Write `relay.json`: binary HTTP as bhttp-js (npm) writes it, and what it reads in messages of ours.
//
//     npm install bhttp-js@0.2.1 && node make_relay.mjs SEALED '{"request": HEX, "response": HEX}' > relay.json
//
// SEALED is a request that ohttpy 0.1a13 (PyPI, in Rust) sealed for key 1, whose private half is the bytes 0 to 31.
import { BHttpDecoder, BHttpEncoder } from "bhttp-js";

const hex = (bytes) => Buffer.from(bytes).toString("hex");
const unhex = (text) => Uint8Array.from(Buffer.from(text, "hex"));
const encoder = new BHttpEncoder(), decoder = new BHttpDecoder();
const fields = (headers) => Object.fromEntries(headers.entries());
const request = await encoder.encodeRequest(new Request("https://www.example.com/hello.txt?x=1", {
  method: "PUT", body: "hi", headers: { "X-A": "b", "User-Agent": "t" } }));
const response = await encoder.encodeResponse(new Response("body", { status: 404, headers: { "X-A": "b" } }));
const out = { written: { request: hex(request), response: hex(response) }, ohttpy: process.argv[2] };
const sent = JSON.parse(process.argv[3]);
const read = decoder.decodeRequest(unhex(sent.request)), back = decoder.decodeResponse(unhex(sent.response));
out.read = {
  request: { data: sent.request, method: read.method, url: read.url, fields: fields(read.headers), content: await read.text() },
  response: { data: sent.response, status: back.status, fields: fields(back.headers), content: await back.text() },
};
console.log(JSON.stringify(out, null, 1));
