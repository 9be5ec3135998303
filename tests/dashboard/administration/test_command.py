"""`fp8scope admin` on the server: while `up` runs, while it does not, and as in Compose."""

from __future__ import annotations

import http.cookiejar
import os
import pty
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from dashboard.helpers.installation import Up, clean_environment, names_below

from fp8scope_dashboard.cli import COMMANDS
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

PASSWORD = "correct horse battery"
LINK = re.compile(r"(http://\S+)/signin/([\w-]{43})/")


def admin(
    *arguments: str, text: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8scope_dashboard.cli", "admin", *arguments]
    variables = {**clean_environment(), **(environment or {})}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=variables, timeout=120, check=False
    )


class Browser:
    """A client with cookies and forms, for signing in."""

    def __init__(self, up: Up) -> None:
        self.up = up
        self.url = up.url
        self.cookies = http.cookiejar.CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def get(self, address: str) -> str:
        return self.open(address)

    def post(self, address: str, **form: str) -> str:
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get(address))
        assert token is not None
        data = urllib.parse.urlencode({"csrfmiddlewaretoken": token[1], **form}).encode()
        return self.open(address, data)

    def open(self, address: str, data: bytes | None = None) -> str:
        """The page. If there is none, the test shows the web server's log."""
        try:
            with self.opener.open(address, data, timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}\n{self.up.log('web')}")

    def name(self) -> str | None:
        """The user who is signed in; None if nobody is."""
        shown = re.search(r'name="username"\s+value="([^"]+)"', self.get(f"{self.url}/account/"))
        return shown and shown[1]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    # The path contains a space, which must work, too.
    with Up(tmp_path_factory.mktemp("an installation") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of an installation that is not running."""
    data_dir = tmp_path_factory.mktemp("stopped")
    with Up(data_dir):
        pass
    return data_dir


def test_it_works(up: Up) -> None:
    """After the first link is used, the command creates another one that signs in."""
    first = Browser(up)
    first.post(up.sign_in_link)
    assert first.name() == "admin"
    result = admin("--data-dir", str(up.data_dir), "link")
    assert result.returncode == 0, result.stderr
    link = result.stdout.strip()
    assert LINK.fullmatch(link)
    assert link.startswith(up.url)
    second = Browser(up)
    second.post(link)
    assert second.name() == "admin"


def test_a_password_set_here_signs_in_and_ends_other_sessions(up: Up) -> None:
    before = Browser(up)
    before.post(admin("--data-dir", str(up.data_dir), "link").stdout.strip())
    done = admin("--data-dir", str(up.data_dir), "password", "--stdin", text=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert before.name() is None
    after = Browser(up)
    after.post(f"{up.url}/signin/", username="admin", password=PASSWORD)
    assert after.name() == "admin"


def test_makes_lists_and_removes_logins_for_sql(up: Up) -> None:
    def reader(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return admin("--data-dir", str(up.data_dir), *arguments, text=text)

    made = reader("sql-reader", "grafana", "--project", "default", "--seconds", "9")
    assert (
        made.returncode == 0 and len(made.stdout.strip()) >= 30 and "reads the project default" in made.stderr
    )
    chosen = reader("sql-reader", "grafana", "--stdin", text=f"{PASSWORD}\n")
    assert (chosen.returncode, chosen.stdout) == (0, "") and PASSWORD not in chosen.stderr
    assert reader("sql-readers").stdout == "grafana\tdefault\t9 s\n"
    url = EmbeddedPostgres(up.data_dir / "postgres").url.replace(
        "postgresql://fp8scope@", "postgresql://grafana@"
    )
    with psycopg.connect(url) as session:
        assert session.execute("SELECT project FROM projects").fetchall() == [("default",)]
    removed = reader("sql-reader", "grafana", "--remove")
    assert removed.returncode == 0 and "Removed the login grafana" in removed.stderr
    again = reader("sql-reader", "grafana", "--remove")
    assert again.returncode == 1 and "there is no login 'grafana'" in again.stderr
    assert PASSWORD not in up.log("postgres")


def test_makes_renames_and_archives_projects(up: Up) -> None:
    def project(*arguments: str) -> subprocess.CompletedProcess[str]:
        return admin("--data-dir", str(up.data_dir), *arguments)

    made = project("project", "sweep", "--new", "--name", "A sweep", "--description", "Rates")
    assert made.returncode == 0 and "made “A sweep”" in made.stderr
    assert "sweep\tA sweep\n" in project("projects").stdout
    changed = project("project", "sweep", "--name", "Another", "--archive")
    assert "name “Another”, archived" in changed.stderr
    assert "sweep\tAnother (archived)\n" in project("projects").stdout
    assert "nothing to change" in project("project", "sweep", "--archive").stderr
    again = project("project", "sweep", "--new")
    assert again.returncode == 1 and "already exists" in again.stderr
    missing = project("project", "nothing", "--archive")
    assert missing.returncode == 1 and "there is no project 'nothing'" in missing.stderr


def test_prompts_for_a_password_without_showing_it(up: Up) -> None:
    """On a terminal the password is asked for twice, without an echo."""
    command = [sys.executable, "-m", "fp8scope_dashboard.cli", "admin", "--data-dir", str(up.data_dir)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], [*command, "password"], clean_environment())
    with closing(os.fdopen(terminal, "r+b", buffering=0)) as stream:
        shown = b""
        for question in (b"New password of admin: ", b"Repeat the password: "):
            while question not in shown:
                shown += stream.read(1024)
            stream.write(b"a third good one\n")
        while b"is set" not in shown:
            shown += stream.read(1024)
        # Wait before the terminal closes, which would send SIGHUP.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"third good" not in shown


def test_an_invited_person_signs_in_as_a_member(up: Up) -> None:
    data = str(up.data_dir)
    result = admin("--data-dir", data, "invite", "ada", "--project", "default", "--role", "viewer")
    assert result.returncode == 0, result.stderr
    browser = Browser(up)
    page = browser.post(result.stdout.strip())
    assert browser.name() == "ada"
    assert "Runs" in page
    repeated = admin("--data-dir", data, "invite", "ada")
    assert (repeated.returncode, repeated.stdout) == (1, "")
    assert "admin link --user ada" in repeated.stderr


def test_starts_the_database_if_up_does_not_run(stopped: Path) -> None:
    result = admin("--data-dir", str(stopped), "link")
    assert result.returncode == 0, result.stderr
    assert "Start it with `fp8scope up`" in result.stderr
    assert names_below(stopped) == []
    assert LINK.fullmatch(result.stdout.strip())
    address = urllib.parse.urlsplit(result.stdout.strip())
    with Up(stopped, "--port", str(address.port)) as restarted:
        browser = Browser(restarted)
        browser.post(result.stdout.strip())
        assert browser.name() == "admin"


def test_uses_the_database_and_address_of_the_environment(stopped: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres(stopped / "postgres") as url:
        environment = {"DATABASE_URL": url, "FP8SCOPE_BASE_URL": "https://fp8.example.org"}
        environment |= {"FP8SCOPE_DATA_DIR": str(tmp_path)}
        result = admin("link", environment=environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("https://fp8.example.org/signin/")
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM accounts_signinlink WHERE used_at IS NULL"
            ).fetchone()
    assert row is not None
    assert row[0] >= 1


@pytest.mark.parametrize(
    ("arguments", "text", "reason"),
    [
        (("link", "--user", "nobody"), "", "there is no user 'nobody' (users: admin"),
        (("password", "--stdin"), "short\n", "too short"),
        (("password", "--stdin"), "", "contains no password"),
        (("password", "--stdin"), "x" * 5000, "longer than 4096"),
        (("password",), "", "no terminal"),
        (("invite", "two words"), "", "username"),
        (("invite", "eve", "--project", "nowhere"), "", "the projects are: default"),
    ],
)
def test_explains_refusals(up: Up, arguments: tuple[str, ...], text: str, reason: str) -> None:
    done = admin("--data-dir", str(up.data_dir), *arguments, text=text)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_refuses_a_password_as_an_argument(up: Up) -> None:
    done = admin("--data-dir", str(up.data_dir), "password", PASSWORD)
    assert done.returncode == 2


def test_refuses_a_directory_without_an_installation(tmp_path: Path) -> None:
    done = admin("--data-dir", str(tmp_path / "nothing"), "link")
    assert done.returncode == 1
    assert "contains no database" in done.stderr
    assert "--data-dir" in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_reports_an_unreachable_database_without_its_password() -> None:
    url = "postgresql://user:hush-hush@127.0.0.1:1/fp8scope"
    done = admin("link", environment={"DATABASE_URL": url, "FP8SCOPE_BASE_URL": "http://localhost"})
    assert done.returncode == 1
    assert "the database does not answer" in done.stderr
    assert "hush-hush" not in done.stderr


def test_all_commands_are_entry_points() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    table = text.split('[project.entry-points."fp8scope.commands"]')[1].split("[")[0]
    assert dict(re.findall(r'([\w-]+) = "fp8scope_dashboard.cli:(\w+)"', table)) == {
        name: name.replace("-", "_") for name in COMMANDS
    }
