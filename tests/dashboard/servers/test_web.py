"""The web server starts while its static files are collected."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest
import urllib3
from helpers.live_servers import web_server

# The web server as a fork of one that imports its modules before the static files are collected.
SLOWLY_COLLECTED = """
import subprocess, sys
from fp8scope_dashboard import preload
preload.import_views()
subprocess.run([sys.executable, "-m", "fp8scope_dashboard.servers.collect"], check=True)
from fp8scope_dashboard.servers import web
web.main(sys.argv[1:])
"""


@pytest.mark.django_db(transaction=True)
def test_serves_files_that_were_collected_while_it_started(tmp_path: Path) -> None:
    log = tmp_path / "web.log"
    # Collecting has begun: there are files, and no list of them yet.
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "begun.0123456789ab.css").write_text("body {}")
    production = {
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "FP8SCOPE_DATA_DIR": str(tmp_path),
    }
    with web_server(log, ("-c", SLOWLY_COLLECTED), **production) as (url, _):
        page = urllib3.request("GET", f"{url}/signin/")
        assert page.status == 200, log.read_text()
        files = re.findall(r'(?:href|src)="(/static/[^"#]+)', page.data.decode())
        assert [name for name in files if name.endswith(".css")]
        assert {urllib3.request("GET", urljoin(url, name)).status for name in files} == {200}
