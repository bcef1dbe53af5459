"""Collections in a bucket whose server has another time than this host."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.repo.names.leases import EXPIRE_S, Lease
from holdfast.repo.names.roots import read_leases
from holdfast.repo.upkeep.collect import MIN_AGE_S
from tests.kit.s3_server import S3Server
from tests.unit.objects.cloud.servers import QUICK

SKEWS_S = [-10 * MIN_AGE_S, 0.0, 10 * MIN_AGE_S]


def open_bucket(server: S3Server) -> holdfast.Store:
    return holdfast.open("s3://bucket/ckpts", storage_options={**server.options, "retry_config": QUICK})


def make_old(server: S3Server, age_s: float) -> None:
    for stored in server.objects.values():
        stored.modified_s -= age_s


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_the_lease_of_a_live_save_is_not_fenced(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s
    open_bucket(server).save("run", {"x": torch.ones(3)})
    lease = Lease(open_bucket(server).repository.store, purpose="a save on another host")

    open_bucket(server).gc()

    lease.renew()
    assert read_leases(open_bucket(server).repository.store)[lease.lease_id].is_live


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_the_lease_of_a_dead_save_is_fenced(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s
    open_bucket(server).save("run", {"x": torch.ones(3)})
    lease = Lease(open_bucket(server).repository.store, purpose="a save that was killed")
    make_old(server, EXPIRE_S + 60.0)

    open_bucket(server).gc()

    leases = read_leases(open_bucket(server).repository.store)
    assert not leases[lease.lease_id].is_live


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_files_are_as_old_as_the_server_says(server: S3Server, skew_s: float) -> None:
    server.skew_s = skew_s
    store = open_bucket(server)
    store.save("run", {"x": torch.arange(1000.0)})
    store.delete("run")

    young = open_bucket(server).gc()
    make_old(server, MIN_AGE_S + 60.0)
    old = open_bucket(server).gc()

    assert young.deleted == 0
    assert old.deleted > 0


def test_a_bucket_needs_no_grace(server: S3Server) -> None:
    store = open_bucket(server)
    store.save("run", {"x": torch.arange(1000.0)})
    store.delete("run")
    make_old(server, MIN_AGE_S + 60.0)

    assert open_bucket(server).gc().waiting_for == []
