"""Limits on connections and requests of an address, and trusted proxies."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.addresses import UNKNOWN, address_group
from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.callers import Callers
from fp8scope_dashboard.edge.rate import Rate
from fp8scope_dashboard.servers.connections import ConnectionRegistry
from fp8scope_dashboard.settings.networks import networks_from_text


def test_it_works() -> None:
    assert address_group("192.0.2.1") == "192.0.2.1"
    assert address_group("2001:db8:1:2:3:4:5:6") == "2001:db8:1:2::/64"
    assert address_group("fe80::1%eth0") == "fe80::/64"
    assert address_group("::ffff:192.0.2.1") == "192.0.2.1"


@given(st.none() | st.text(max_size=100))
def test_hosts_that_are_not_addresses_are_one_group(host: str | None) -> None:
    try:
        assert len(address_group(host)) < 50
    except ValueError:
        pytest.fail(f"{host!r} raised")
    if host and not set(host) & set("0123456789abcdefABCDEF:.%"):
        assert address_group(host) == UNKNOWN


def test_a_rate_allows_a_burst_and_then_a_number_per_second() -> None:
    now = [0.0]
    rate = Rate(burst=3, per_second=2, most=10, clock=lambda: now[0])
    assert [rate.take("a") for _ in range(5)] == [True] * 3 + [False] * 2
    assert rate.take("b")
    now[0] += 1
    assert [rate.take("a") for _ in range(3)] == [True, True, False]
    now[0] += 1000
    assert [rate.take("a") for _ in range(4)] == [True] * 3 + [False]


def test_a_rate_forgets_the_oldest_keys() -> None:
    rate = Rate(burst=1, per_second=0.001, most=10, clock=lambda: 0.0)
    for i in range(100):
        assert rate.take(str(i))
    assert len(rate) == 10
    assert rate.take("0") and not rate.take("0")


def test_callers_are_remembered_without_their_secrets() -> None:
    callers = Callers(most=2)
    for secret in ("one", "two", "three"):
        callers.add(secret)
    assert [secret in callers for secret in ("one", "two", "three")] == [False, True, True]
    assert not any(b"three" in digest for digest in callers._digests)
    callers.discard("three")
    assert "three" not in callers


def test_a_registry_counts_unauthenticated_clients_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED_PER_ADDRESS", 2)
    monkeypatch.setattr(limits, "UNAUTHENTICATED", 3)
    registry = ConnectionRegistry(most=10)
    registry.enter("a")
    registry.enter("a")
    assert not registry.has_room("a") and registry.has_room("b")
    registry.enter("b")
    assert not registry.has_room("c")
    # One connection proves its identity, and another one leaves.
    registry.prove("a")
    assert registry.has_room("a")
    registry.prove("b")
    registry.leave()
    assert (registry.total, registry.unauthenticated, dict(registry.by_address)) == (2, 1, {"a": 1})
    registry.most = 2
    assert not registry.has_room("c")


def test_trusted_proxies_are_not_limited_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED_PER_ADDRESS", 1)
    registry = ConnectionRegistry(most=10, proxies=["10.0.0.0/8"])
    for _ in range(3):
        assert registry.has_room(registry.group("10.1.2.3"))
        registry.enter(registry.group("10.1.2.3"))
    registry.enter(registry.group("192.0.2.1"))
    assert not registry.has_room(registry.group("192.0.2.1"))
    assert registry.group(None) == registry.group("no address") == UNKNOWN


def test_proxies_are_addresses_or_networks() -> None:
    assert networks_from_text("", "FP8SCOPE_TRUSTED_PROXIES") == []
    assert networks_from_text(" 127.0.0.1, 10.1.2.3/8,fd00::/8,", "X") == [
        "127.0.0.1/32",
        "10.0.0.0/8",
        "fd00::/8",
    ]
    with pytest.raises(ImproperlyConfigured, match="FP8SCOPE_TRUSTED_PROXIES: 'nginx' is not an address"):
        networks_from_text("127.0.0.1,nginx", "FP8SCOPE_TRUSTED_PROXIES")
