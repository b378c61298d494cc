"""Tenants: keys, salts."""

import pytest

from cluster.errors import Unauthenticated
from cluster.gateway.auth import DEFAULT_TENANT, Tenants, digest_of

TENANTS = Tenants({"red": digest_of("key-red"), "blue": digest_of("key-blue")}, secret=b"s" * 32)


def test_a_key_names_its_tenant() -> None:
    assert TENANTS.tenant_of([("authorization", "Bearer key-blue")]) == "blue"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "key-red")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer key-reD")],
        [("authorization", f"Bearer {digest_of('key-red')}")],
        [("x-api-key", "key-red")],
    ],
)
def test_anything_else_is_refused_without_repeating_the_key(headers: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        TENANTS.tenant_of(headers)
    assert "key-re" not in str(caught.value)


def test_without_keys_there_is_one_tenant() -> None:
    assert Tenants().tenant_of([]) == DEFAULT_TENANT


def test_salts_differ_by_tenant_and_by_secret_and_agree_between_gateways() -> None:
    assert len(TENANTS.salt_of("red")) == 32
    assert TENANTS.salt_of("red") != TENANTS.salt_of("blue")
    assert TENANTS.salt_of("red") == Tenants(secret=b"s" * 32).salt_of("red")
    assert Tenants().salt_of("red") != Tenants().salt_of("red")
