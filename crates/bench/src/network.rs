//! Cases of VMs' network: the host's side, from a start to an answer by TCP, and traffic.
//!
//! For traffic all VMMs boot the neutral kernel. Jiffy's runs without a node, and the link has no
//! rules of a firewall.

use crate::host_files::{
    GUEST_INITRAMFS, add_config, add_guest_initramfs, addition, guest_program, kernel_modules,
    with_libraries,
};
use crate::machine::VMM;
use crate::peers::{Boot, Peer};
use crate::plan::{Case, HostCommands, Kind, Network, Start, TAP, TAP_DESCRIPTOR, TapUse};
use crate::traffic::{self, HOST, PREFIX, Traffic};
use anyhow::{Result, ensure};
use jiffy_machine::image::build::Addition;
use jiffy_sys::programs::on_path;
use jiffy_wire::vmm;
use std::path::Path;

/// The host's side of the network of one VM.
pub const HOST_SETUP: &str = "net/host-setup";
/// From the start of `jiffy run` to a byte from a TCP server in the guest.
pub const COLD: &str = "net/cold/tcp";
/// The same from a golden snapshot.
pub const GOLDEN: &str = "net/golden/tcp";
/// From a connection to a VM that sleeps to that byte.
pub const WAKE: &str = "net/wake/tcp";
/// The figures of users' commands for [`HOST_SETUP`] are this monitor's.
const COMMANDS: &str = "ip-iptables";

/// The image with the TCP server.
pub const IMAGE: &str = "answering";
/// Memory of its VMs, MiB: another size than those of other cases, which tells their golden
/// snapshots apart.
pub const MEMORY_MIB: &str = "136";
/// In the machine: the TCP server.
pub const SERVER: &str = "/bench/guest";

/// In the machine: folder of kernel modules, which are loaded by name.
pub const MODULES: &str = "/bench/modules";
const RAM_MIB: u64 = 128;

/// Modules of the machine's kernel for peers: QEMU's vhost-net, and what Debian's iptables needs.
const PEER_MODULES: &[&str] = &["vhost_net", "nft_compat", "xt_conntrack", "xt_MASQUERADE"];

/// Whether this is a case of traffic. Such a case is compared with peers, but not checked.
pub fn is_traffic(case: &str) -> bool {
    Traffic::ALL.iter().any(|traffic| traffic.case() == case)
}

/// Cases of Jiffy that `make bench-check` measures, too.
pub fn cases(runs: u32) -> Vec<Case> {
    let case = |name: &str, network: Network, most: u32, warm_up: u32| Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::Network(network),
        // They vary little.
        runs: runs.min(most),
        warm_up,
    };
    vec![
        case(HOST_SETUP, Network::HostSetup, 20, 1),
        // The first run starts the daemon and imports the image.
        case(COLD, Network::ToAnswer(Start::Cold), 10, 2),
        case(GOLDEN, Network::ToAnswer(Start::Golden), 10, 2),
        case(WAKE, Network::ToAnswer(Start::Asleep), 5, 1),
    ]
}

/// Files that [`cases`] need in the machine.
///
/// # Errors
///
/// If the path of this program can't be read.
pub fn additions() -> Result<Vec<Addition>> {
    Ok(vec![addition(guest_program()?, SERVER)])
}

/// The kernels of guests of VMMs without a node: the neutral one for traffic, and that with which
/// peers answer soonest, Jiffy's.
pub struct Kernels<'a> {
    /// A VM with the neutral kernel and no device.
    pub plain: &'a vmm::VmmConfig,
    /// Jiffy's kernel.
    pub base: &'a str,
}

/// Cases that compare with peers, with their files.
///
/// # Errors
///
/// If a library or a module of a peer is missing, or a file can't be written in `scratch`.
pub fn compared(
    scratch: &Path,
    kernels: &Kernels,
    peers: &[Peer],
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Vec<Case>> {
    add_guest_initramfs(scratch, files)?;
    let mut cases = jiffy_traffic(scratch, kernels.plain, files, runs)?;
    if peers.is_empty() {
        return Ok(cases);
    }
    files.extend(modules(scratch)?);
    let commands = commands(files)?;
    if let Some(commands) = &commands {
        cases.push(Case {
            name: HOST_SETUP.into(),
            monitor: COMMANDS.into(),
            kind: Kind::Network(Network::HostSetupBy(commands.clone())),
            runs: runs.min(10),
            warm_up: 1,
        });
    } else {
        eprintln!("{HOST_SETUP} {COMMANDS}: left out: there is no `ip` or no `iptables` here");
    }
    let on_network = [Peer::Qemu, Peer::Firecracker];
    for peer in peers.iter().filter(|peer| on_network.contains(peer)) {
        if peer.version().is_none() {
            continue;
        }
        if let Some(commands) = &commands {
            let argv = boot(scratch, *peer, kernels.base, &kernels.plain.boot, files)?;
            let host = commands.clone();
            let network = Network::PeerToAnswer { host, argv };
            cases.push(Case {
                name: COLD.into(),
                monitor: peer.name().into(),
                kind: Kind::Network(network),
                runs: runs.min(10),
                warm_up: 1,
            });
        }
        let plain = kernels.plain.boot.kernel.display().to_string();
        let argv = boot(scratch, *peer, &plain, &kernels.plain.boot, files)?;
        cases.extend(traffic_cases(peer.name(), &argv, TapUse::Named, runs));
    }
    Ok(cases)
}

fn jiffy_traffic(
    scratch: &Path,
    plain: &vmm::VmmConfig,
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Vec<Case>> {
    let mut config = plain.clone();
    config.boot.initrd = Some(GUEST_INITRAMFS.into());
    config.boot.command_line = command_line(&plain.boot);
    config.nets = vec![vmm::Net {
        mac: crate::peers::MAC.parse()?,
        mtu: None,
        backend: vmm::NetBackend::Tap(vec![TAP_DESCRIPTOR]),
        receive_limit: Default::default(),
        send_limit: Default::default(),
        guard: None,
    }];
    let guest = add_config(scratch, "traffic.json", &config, files)?;
    let argv = [VMM, "run", "--config", &guest].map(String::from);
    Ok(traffic_cases("jiffy", &argv, TapUse::Inherited, runs))
}

fn traffic_cases(monitor: &str, argv: &[String], tap: TapUse, runs: u32) -> Vec<Case> {
    let case = |traffic: Traffic| Case {
        name: traffic.case().into(),
        monitor: monitor.into(),
        kind: Kind::Network(Network::Traffic {
            argv: argv.to_vec(),
            tap,
            traffic,
        }),
        // Each boots a guest, and warms up in it.
        runs: runs.min(3),
        warm_up: 0,
    };
    Traffic::ALL.map(case).into()
}

fn command_line(boot: &vmm::Boot) -> String {
    format!("{} {}=1", boot.command_line, traffic::PARAMETER)
}

/// The command with which a peer boots a guest that serves, on the TAP.
fn boot(
    scratch: &Path,
    peer: Peer,
    kernel: &str,
    like: &vmm::Boot,
    files: &mut Vec<Addition>,
) -> Result<Vec<String>> {
    let kernel_name = kernel.rsplit('/').next().unwrap_or_default();
    let name = format!("{}-{kernel_name}-traffic.json", peer.name());
    let config = format!("/bench/{name}");
    let (argv, contents) = peer.boot(&Boot {
        kernel,
        initramfs: GUEST_INITRAMFS,
        command_line: &command_line(like),
        ram_mib: RAM_MIB,
        tap: Some(TAP),
        config: &config,
    });
    if let Some(contents) = contents {
        let host = scratch.join(&name);
        std::fs::write(&host, contents)?;
        files.push(addition(host, &config));
    }
    Ok(argv)
}

/// Modules for peers, in files whose order is that of loading.
fn modules(scratch: &Path) -> Result<Vec<Addition>> {
    let mut additions = Vec::new();
    for (number, module) in kernel_modules(PEER_MODULES)?.into_iter().enumerate() {
        let name = format!("{number:02}-{}.ko", module.name);
        let host = scratch.join(&name);
        std::fs::write(&host, module.contents)?;
        additions.push(addition(host, &format!("{MODULES}/{name}")));
    }
    Ok(additions)
}

/// What users type for one VM (Firecracker, docs/network-setup.md), with the programs it needs;
/// `None` if this host does not have them.
fn commands(files: &mut Vec<Addition>) -> Result<Option<HostCommands>> {
    let (Some(ip), Some(iptables)) = (on_path("ip"), on_path("iptables")) else {
        return Ok(None);
    };
    files.extend(with_libraries(&ip, "/bench/ip")?);
    files.extend(with_libraries(&iptables, "/bench/iptables")?);
    files.extend(extensions(&iptables)?);
    let words = |text: String| -> Vec<String> { text.split(' ').map(String::from).collect() };
    let address = format!("{HOST}/{PREFIX}");
    let rules = [
        format!("FORWARD -i {TAP} -o eth0 -j ACCEPT"),
        format!("FORWARD -i eth0 -o {TAP} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
        format!("POSTROUTING -t nat -s {address} -o eth0 -j MASQUERADE"),
    ];
    let change = |how: &str| {
        rules
            .clone()
            .map(|rule| format!("/bench/iptables {how} {rule}"))
    };
    let make = [
        format!("/bench/ip tuntap add dev {TAP} mode tap"),
        format!("/bench/ip addr add {address} dev {TAP}"),
        format!("/bench/ip link set dev {TAP} up"),
    ];
    let remove = [format!("/bench/ip link del {TAP}")];
    Ok(Some(HostCommands {
        make: make.into_iter().chain(change("-A")).map(words).collect(),
        remove: change("-D").into_iter().chain(remove).map(words).collect(),
    }))
}

/// The libraries that iptables loads for the rules' matches and targets.
fn extensions(iptables: &Path) -> Result<Vec<Addition>> {
    let folders = ["/usr/lib/x86_64-linux-gnu/xtables", "/usr/lib/xtables"];
    let folder = folders.map(Path::new).into_iter().find(|it| it.is_dir());
    ensure!(
        folder.is_some(),
        "{}: its extensions are in none of {folders:?}",
        iptables.display()
    );
    let names = [
        "libxt_standard.so",
        "libxt_conntrack.so",
        "libipt_MASQUERADE.so",
        "libxt_MASQUERADE.so",
    ];
    let paths = names.iter().filter_map(|name| Some(folder?.join(name)));
    let paths = paths.filter(|path| path.is_file());
    Ok(paths
        .map(|path| addition(path.clone(), &path.display().to_string()))
        .collect())
}
