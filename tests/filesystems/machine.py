"""A Linux kernel as a process (Debian's user-mode-linux), for filesystems that this machine's kernel lacks.

Its root is this machine's, so that Python and the tests are there. It has a vfat disk at /mnt/vfat; and a kernel NFS
server exports an ext4 disk, mounted over loopback at /mnt/nfs3 (version 3) and /mnt/nfs4 (4.2), and with root squash at
/mnt/squash.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.filesystems.debian import require

_PROGRAMS: Final = {
    "linux.uml": "user-mode-linux",
    "modprobe": "kmod",
    "mkfs.vfat": "dosfstools",
    "mkfs.ext4": "e2fsprogs",
    "exportfs": "nfs-kernel-server",
    "mount.nfs": "nfs-common",
    "rpcbind": "rpcbind",
}
_DISK_BYTES: Final = 600 << 20
_BOOT_S: Final = 3000.0

_INIT: Final = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TMPDIR=/mnt/tmp
mount -t proc proc /proc; mount -t sysfs sys /sys
for place in /mnt /run /dev/shm /var/lib/nfs; do mkdir -p $place; mount -t tmpfs tmpfs $place; done
mkdir -p /mnt/{tmp,modules/lib/modules,vfat,export,nfs3,nfs4,squash}
ip link set lo up
ln -s /usr/lib/uml/modules/$(uname -r) /mnt/modules/lib/modules/
for module in vfat nls_cp437 nls_iso8859-1 nfsd nfsv3 nfsv4; do modprobe -d /mnt/modules $module; done

mkfs.vfat -F 32 /dev/ubda && mount -t vfat /dev/ubda /mnt/vfat
mkfs.ext4 -q /dev/ubdb && mount /dev/ubdb /mnt/export
mkdir -p /var/lib/nfs/{v4recovery,rpc_pipefs,sm,sm.bak} /run/rpcbind /mnt/export/{open,squash}
chmod 755 /mnt/export/squash
touch /var/lib/nfs/{etab,rmtab,state}
mount -t nfsd nfsd /proc/fs/nfsd
rpcbind -w
options=rw,insecure,no_subtree_check
# Version 4 has one tree of exports, and the root of this machine cannot be its root.
exportfs -o $options,no_root_squash,fsid=0 127.0.0.1:/mnt/export
exportfs -o $options,no_root_squash,fsid=1 127.0.0.1:/mnt/export/open
exportfs -o $options,root_squash,fsid=2 127.0.0.1:/mnt/export/squash
# After the grace time locks are given; it is for clients of a server that was restarted.
rpc.nfsd --grace-time 1 --lease-time 10 4; rpc.mountd; rpc.statd --no-notify
mount -t nfs -o vers=3 127.0.0.1:/mnt/export/open /mnt/nfs3
mount -t nfs -o vers=4.2 127.0.0.1:/open /mnt/nfs4
mount -t nfs -o vers=3 127.0.0.1:/mnt/export/squash /mnt/squash
sleep 2

cd {cwd}
{command} > {output} 2>&1 < /dev/null
echo $? > {code}
poweroff -f
"""


def run_inside(folder: Path, command: Sequence[str]) -> tuple[int, str]:
    """Boot, run a command in the current directory, and return its exit code and what it said."""
    require(_PROGRAMS)
    disks = [folder / "disk-a", folder / "disk-b"]
    for disk in disks:
        with disk.open("wb") as file:
            file.truncate(_DISK_BYTES)
    files = {name: folder / name for name in ("init", "output", "code")}
    words = {"cwd": Path.cwd(), "output": files["output"], "code": files["code"]}
    script = _INIT
    for name, value in words.items():
        script = script.replace(f"{{{name}}}", shlex.quote(str(value)))
    files["init"].write_text(script.replace("{command}", shlex.join(command)))
    files["init"].chmod(0o755)
    kernel = ["linux.uml", "mem=2048M", *(f"ubd{number}={disk}" for number, disk in enumerate(disks))]
    root = ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={files['init']}"]
    said = subprocess.run(
        [*kernel, *root, "con=null", "con0=null,fd:1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_BOOT_S,
        check=False,
    )
    if not files["code"].exists():
        pytest.skip(f"user-mode-linux does not run here: {said.stdout[-2000:]}{said.stderr[-2000:]}")
    return int(files["code"].read_text()), files["output"].read_text(errors="replace")
