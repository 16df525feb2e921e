"""HTTP servers of others as real processes, for tests: on free ports of 127.0.0.1, with TLS, in folders of their own.

    with running_server("nginx", tmp_path, files, upstream=origin.address) as server:
        await client.get(server.url("/hello"))

granian, hypercorn and uvicorn serve `APP`; nginx, caddy and haproxy stand before an upstream; nghttpd serves files.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.web.server import TlsFiles

NAME: Final = "localhost"
"""What the certificates have to be for."""
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0
_STEP_S: Final = 0.02
_PATH: Final = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"
"""Where packages put servers; the first is not in everybody's PATH."""

APP: Final = '''
"""Answers as the path says."""

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    path, body, more = scope["path"], b"", True
    if path == "/refuse":
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        return
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if path == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    headers = [(b"x-version", scope["http_version"].encode()), (b"content-type", b"text/plain")]
    if path == "/none":
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    if path == "/hello":
        body = b"hello"
    elif path.startswith("/large/"):
        body = bytes(range(256)) * (int(path[7:]) // 256)
    elif path == "/text":
        body = b"the same again and again " * 4000
    elif path == "/headers":
        headers += [(b"x-many-%d" % n, b"v" * 200) for n in range(60)]
    if path != "/chunked":
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["method"] == "HEAD":  # granian sends it over HTTP/2 else, which breaks the protocol (curl fails too)
        body = b""
    for start in range(0, len(body), 100_000):
        await send({"type": "http.response.body", "body": body[start:start + 100_000], "more_body": True})
    await send({"type": "http.response.body", "body": b""})
'''

_NGINX: Final = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_shutdown_timeout 20s;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    server {{
        listen 127.0.0.1:{port} ssl http2;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        proxy_http_version 1.1;
        proxy_buffering off;
        proxy_buffer_size 32k;
        proxy_buffers 8 32k;
        location = /refuse {{ client_max_body_size 1k; proxy_pass http://{upstream}; }}
        {options}
        location / {{ proxy_pass http://{upstream}; }}
    }}
}}
"""
_CADDY: Final = """
{{
    admin off
    auto_https off
    storage file_system {folder}/storage
    servers {{
        protocols {protocols}
    }}
}}
https://localhost:{port} {{
    bind 127.0.0.1
    tls {certificate} {key}
    respond /refuse 413
    {options}
    reverse_proxy {upstream}
}}
"""
_HAPROXY: Final = """
global
    maxconn 1000
    {options}
defaults
    mode http
    timeout connect 20s
    timeout client 20s
    timeout server 20s
frontend here
    bind 127.0.0.1:{port} ssl crt {folder}/both.pem alpn h2,http/1.1
    http-request return status 413 if {{ path /refuse }}
    default_backend there
backend there
    server one {upstream}
"""
PROGRAMS: Final = ("nginx", "caddy", "haproxy", "nghttpd")
"""Servers that the machine may have or not; the others are Python packages."""


class ForeignServer:
    """A server in a child process. Made by `running_server`.

    Attributes:
        name: which.
        address: where it listens.
        folder: its files.
    """

    def __init__(self, name: str, address: Address, folder: Path, scheme: str, command: Sequence[str]) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._scheme = scheme
        self._command = command
        self._process = self._start()

    def url(self, path: str = "/") -> str:
        """Give a URL of it."""
        return f"{self._scheme}://{NAME}:{self.address.port}{path}"

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "output").read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, as its operators do for a reload."""
        self._process.send_signal(number)

    def replace(self, *options: str) -> None:
        """Start another one on the same port, for servers whose reload is that; the caller ends the first with
        `options`, in which `{pid}` is its process."""
        old = self._process
        self._process = self._start(*[option.format(pid=old.pid) for option in options])
        old.wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End it and wait for that."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, *options: str) -> "subprocess.Popen[bytes]":
        environ = {**os.environ, "HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder)}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - a server that a test names
                [*self._command, *options], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environ,
            )  # fmt: skip

    def wait_started(self) -> None:
        """Wait until it takes connections; an AssertionError shows its log where it does not.

        That it listens is not enough: the worker that takes them may not have been started yet.
        """
        clock = SystemClock()
        end = clock.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and clock.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=1.0) as sock:
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    sock.recv(1)  # its end, or a complaint
                return
            time.sleep(_STEP_S)
        self.stop()
        raise AssertionError(f"{self.name} did not start: {self.log[-2000:]}")


def find(name: str) -> str | None:
    """Give the path of a server's program, None where the machine has none."""
    return shutil.which(name, path=_PATH)


@contextlib.contextmanager
def running_server(
    name: str,
    folder: Path,
    files: TlsFiles | None,
    *,
    upstream: Address | None = None,
    options: str = "",
    http: str = "auto",
    app: str = APP,
) -> Iterator[ForeignServer]:
    """Run a server.

    Args:
        name: `granian`, `hypercorn`, `uvicorn`, or one of `PROGRAMS`.
        folder: empty, for its files.
        files: certificate and key for `NAME`; None for clear text (Python servers only).
        upstream: whom it stands before (nginx, caddy, haproxy).
        options: lines for its configuration (nginx and caddy: of the server, haproxy: global), or arguments.
        http: granian's choice of versions: `1`, `2` or `auto`; with `3` caddy speaks that too, on the same UDP port.
        app: source of the ASGI application `app` that the Python servers serve.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = Address(*sock.getsockname())
    folder.chmod(0o755)
    command = _python_command(name, address, files, options, http)
    if command is None:
        if files is None:
            raise ValueError(f"{name} is run with TLS only")
        command = _program_command(name, address, folder, files, upstream, options, http)
    else:
        (folder / "served.py").write_text(app)
    server = ForeignServer(name, address, folder, "http" if files is None else "https", command)
    try:
        server.wait_started()
        yield server
    finally:
        server.stop()


def _python_command(name: str, address: Address, files: TlsFiles | None, options: str, http: str) -> list[str] | None:
    python = [sys.executable, "-m", name]
    place = f"{address.host}:{address.port}"
    certificate, key = (str(files.certificate), str(files.key)) if files is not None else ("", "")
    match name:
        case "granian":
            tls = ["--ssl-certificate", certificate, "--ssl-keyfile", key] if files is not None else []
            own = [
                "--interface",
                "asgi",
                "--port",
                str(address.port),
                "--http",
                http,
                "--no-log",
                "--workers-kill-timeout",
                "1",
                *tls,
            ]
        case "hypercorn":
            own = ["--bind", place, *(["--certfile", certificate, "--keyfile", key] if files is not None else [])]
        case "uvicorn":
            tls = ["--ssl-certfile", certificate, "--ssl-keyfile", key] if files is not None else []
            own = ["--port", str(address.port), "--lifespan", "off", "--log-level", "warning", *tls]
        case _:
            return None
    return [*python, *own, *options.split(), "served:app"]


def _program_command(
    name: str, address: Address, folder: Path, files: TlsFiles, upstream: Address | None, options: str, http: str
) -> list[str]:
    program = find(name)
    if program is None:
        raise FileNotFoundError(f"{name} is not installed")
    if name == "nghttpd":
        return [
            program, "--address=127.0.0.1", f"--htdocs={folder}", *options.split(), str(address.port),
            str(files.key), str(files.certificate),
        ]  # fmt: skip
    template = {"nginx": _NGINX, "caddy": _CADDY, "haproxy": _HAPROXY}[name]
    config = folder / f"{name}.conf"
    config.write_text(
        template.format(
            folder=folder, port=address.port, certificate=files.certificate, key=files.key, options=options,
            protocols="h1 h2 h3" if http == "3" else "h1 h2",
            upstream=upstream if upstream is not None else Address("127.0.0.1", 1),
        )
    )  # fmt: skip
    match name:
        case "nginx":
            # Its workers would else be another user's, who cannot read the folder.
            user = ["-g", "user root;"] if os.geteuid() == 0 else []
            return [program, "-c", str(config), "-e", str(folder / "error.log"), "-p", str(folder), *user]
        case "caddy":
            return [program, "run", "--adapter", "caddyfile", "--config", str(config)]
        case _:
            both = folder / "both.pem"
            both.touch(mode=0o600)
            both.write_bytes(files.certificate.read_bytes() + files.key.read_bytes())
            return [program, "-db", "-f", str(config)]
