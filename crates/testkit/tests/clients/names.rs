//! Which name servers VMs in the machine use.

use crate::installation::Host;
use crate::run;
use std::process::Command;

/// Runs in namespaces with a network of its own and two name servers, of which `/etc/resolv.conf`
/// names the first and then the second.
const SCRIPT: &str = r#"
set -e
busybox ip link set lo up
mkdir "$FOLDER/etc"
echo "nameserver 127.0.0.1" >"$FOLDER/etc/resolv.conf"
mount --bind "$FOLDER/etc/resolv.conf" /etc/resolv.conf
serve() {
    PATH=$PATH:/usr/sbin dnsmasq --no-daemon --conf-file=/dev/null --no-resolv --no-hosts \
        --bind-interfaces --listen-address="$1" --local=/printer.example/ --address=/printer.example/"$2" 2>/dev/null &
}
serve 127.0.0.1 192.0.2.1
servers=$!
serve 127.0.0.2 192.0.2.2
servers="$servers $!"
trap '"$JIFFY" machine rm --force >/dev/null 2>&1; kill $servers' EXIT
"$JIFFY" run --rm -- nslookup printer.example
echo "nameserver 127.0.0.2" >"$FOLDER/etc/resolv.conf"
tries=0
until "$JIFFY" run --rm -- nslookup printer.example | tee "$FOLDER/said" | grep -q 192.0.2.2; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { echo "never the second server"; exit 1; }
done
cat "$FOLDER/said"
"#;

#[test]
fn vms_use_the_name_servers_of_this_host_also_when_they_change() {
    let host = Host::new();
    let said = run(Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "--net"])
        .args(["sh", "-c", SCRIPT])
        .env("JIFFY", &host.jiffy)
        .env("FOLDER", host.folder.path())
        .env("JIFFY_MACHINE", "always")
        .env("JIFFY_DATA", host.folder.path().join("data"))
        .env("JIFFY_RUN", host.folder.path().join("run")));
    let at = |address| said.find(address).unwrap_or_else(|| panic!("{said}"));
    assert!(at("192.0.2.1") < at("192.0.2.2"), "{said}");
}
