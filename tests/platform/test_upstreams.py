"""A real platform's upstreams, changed by command while it runs, and a plug-in that its gateway loads."""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.request

import jwt
import pytest

from stormline.testing.platform import running_platform

pytestmark = [pytest.mark.platform, pytest.mark.timeout(150)]

PLUGIN = """
from stormline.appgw.protocols import Limits


class Echo:
    name = "echo"
    limits = Limits()

    async def opened(self, stream):
        pass

    async def message(self, stream, message):
        await stream.send(message)

    async def closed(self, stream):
        pass
"""
CLIENT = """
import asyncio
import os

import stormline


async def main():
    bundle = os.environ["STORMLINE_STATE"] + "/bundle.json"
    async with stormline.AsyncClient(bundle) as client, client.channel() as channel:
        async with channel.protocol("echo") as stream:
            await stream.send(b"hello")
            print((await stream.receive()).decode())


asyncio.run(main())
"""


@contextlib.contextmanager
def service():
    """Run a service that shows the identity it was told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = (self.headers["stormline-identity"] or "").encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_upstreams_by_command_identity_by_its_key_and_a_plug_in(tmp_path):
    plugins = tmp_path / "plugins"
    info = plugins / "echo_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (plugins / "echo_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stormline.protocols]\necho = echo_plugin:Echo\n")
    paths = os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH"))))
    with running_platform(tmp_path / "state", environ={"PYTHONPATH": paths}) as platform, service() as origin:
        record = tmp_path / "upstreams.json"
        shown = platform.command("upstreams", "show", "--out", str(record))
        assert shown.returncode == 0, shown.stderr
        rules = json.loads(record.read_text())
        rules["upstreams"] = [{"name": "who", "host": "shop.demo", "path": "/who/*", "endpoints": [{"origin": origin}]}]
        record.write_text(json.dumps(rules))
        done = platform.command("upstreams", "set", str(record), "--json")
        assert done.returncode == 0, done.stderr
        again = platform.command("upstreams", "set", str(record))
        assert (again.returncode, "changed meanwhile" in again.stderr) == (1, True)
        wanted = [[{"origin": origin, "weight": 1, "circuit": "closed"}]]
        for _ in range(20):  # each command takes a moment; gateways follow within one
            health = json.loads(platform.command("upstreams", "health", "--json").stdout)["upstreams"]
            found = [each["endpoints"] for each in health if each["name"] == "who"]
            if found == wanted:
                break
        assert found == wanted
        text = platform.command("get", "https://shop.demo/who/me").stdout.strip()
        with urllib.request.urlopen(f"http://{platform.addresses['admin']}/v1/identity-keys") as answer:
            keys = jwt.PyJWKSet.from_dict(json.load(answer))
        kid = jwt.get_unverified_header(text)["kid"]
        claims = jwt.decode(text, keys[kid], algorithms=["EdDSA"], audience="who", issuer="stormline:u1")
        assert claims["app"] == "demo"
        assert platform.command("get", "https://shop.demo/feed").returncode == 0
        asked = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env=platform.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (asked.returncode, asked.stdout) == (0, "hello\n"), asked.stderr
