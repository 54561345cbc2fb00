#!/usr/bin/env bash
# boot.sh FOLDER: becomes systemd as the first process of this PID namespace, over a copy-on-write view of this machine's
# root.  Run by booted.py inside new namespaces; nothing it does reaches the machine, but its processes and its network.
set -euo pipefail
folder=$1

mount --make-rprivate /
mount -t tmpfs tmpfs "$folder"
mkdir "$folder/upper" "$folder/work" "$folder/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
cd "$folder/root"
mount -t proc proc proc
mount --bind -o ro proc/sys proc/sys # no sysctl of this machine is touched
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/systemd sys/fs/cgroup/unified
mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
mount -t tmpfs tmpfs dev
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir -p dev/shm var/log/journal
for place in dev/shm run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$place"; done

# What lies in a folder that is empty in this view (a checkout in /tmp) is laid into it again, as a view of its own.
number=0
for path in "$STALLWATCH_TREE" "$STALLWATCH_ENVIRONMENT"; do
    [[ -e .$path ]] && continue
    number=$((number + 1))
    mkdir -p ".$path" "$folder/upper$number" "$folder/work$number"
    mount -t overlay overlay -o "lowerdir=$path,upperdir=$folder/upper$number,workdir=$folder/work$number" ".$path"
done

# Nothing of this machine's own services is started.
rm -f etc/fstab
printf '[Unit]\nDescription=trial\nAllowIsolate=yes\n' >etc/systemd/system/trial.target
ln -sf /etc/systemd/system/trial.target etc/systemd/system/default.target

# The program, where the unit looks for it; a folder on the way that only root may enter is opened in this view.
rm -rf opt/stallwatch
ln -s "$STALLWATCH_ENVIRONMENT" opt/stallwatch
for path in "$STALLWATCH_ENVIRONMENT" "$STALLWATCH_TREE" "$(readlink -f "$STALLWATCH_ENVIRONMENT/bin/python")"; do
    while [[ $path != / ]]; do
        chmod o+rx ".$path"
        path=$(dirname "$path")
    done
done

pivot_root . mnt
cd /
umount -l /mnt
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=journal --show-status=no
