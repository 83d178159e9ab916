//! A thousand VMs in jails and on a network, ten at a time, while the daemon and monitors are killed
//! at random times.
//!
//! `JIFFY_SEED=N` chooses other kills, and `JIFFY_VMS=N` another number of VMs.

use super::{Left, OPTIONS, SETTLED, ask, assert_matches_vms, isolated, quiet};
use crate::client::Answer;
use crate::daemon::{Daemon, eventually, kill, named, processes, run_of, vmms};
use jiffy_net::traces::Traces;
use jiffy_wire::api::{CreateVm, NetworkUse, Vm, VmState};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

const VMS: u64 = 1000;
const AT_ONCE: usize = 10;
/// Kills come at most this long after the requests of a phase, which take about as long.
const LATEST_MS: u64 = 200;
/// The published ports of the first VM of a round; the others have the following ones.
const PORT: usize = 20_000;

#[test]
fn a_thousand_vms_leave_nothing_behind() {
    let number = |name, otherwise| match std::env::var(name) {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => otherwise,
    };
    let (seed, vms) = (number("JIFFY_SEED", 1), number("JIFFY_VMS", VMS));
    eprintln!("JIFFY_SEED={seed} JIFFY_VMS={vms}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut daemon = isolated::daemon(&OPTIONS);
    let mut tally = Tally::default();
    // The first run makes the image.
    round(&mut daemon, 0, &Round::default(), &mut tally);
    let before = State::settled(&daemon);
    for number in 1..=vms / AT_ONCE as u64 {
        // A daemon makes a link ahead once it has run a VM, so that one has to survive.
        let checked = number % 10 == 0 || number == vms / AT_ONCE as u64;
        let kills = match checked {
            true => Round::default(),
            false => Round::choose(&mut random),
        };
        round(&mut daemon, number, &kills, &mut tally);
        if checked {
            before.assert_unchanged(&daemon);
        }
    }
    eprintln!("{tally:?}");
    let rounds = vms as usize / AT_ONCE;
    assert!(tally.ran * 2 > vms as usize, "most were never up");
    assert!(tally.daemons * 4 >= rounds && tally.monitors * 2 >= rounds);
}

/// What happened.
#[derive(Debug, Default)]
struct Tally {
    ran: usize,
    daemons: usize,
    monitors: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    /// Of those that exist then, the one at this place, modulo their number.
    Monitor(usize),
}

/// The kills of ten VMs' lives, each so many milliseconds after the begin of its phase.
#[derive(Debug, Default)]
struct Round {
    starting: Vec<(u64, Victim)>,
    running: Vec<(u64, Victim)>,
    removing: Vec<(u64, Victim)>,
}

impl Round {
    fn choose(random: &mut fastrand::Rng) -> Round {
        let mut phase = || {
            let mut kills: Vec<(u64, Victim)> = (0..random.usize(..3))
                .map(|_| (random.u64(..LATEST_MS), Victim::Monitor(random.usize(..))))
                .collect();
            if random.usize(..4) == 0 {
                kills.push((random.u64(..LATEST_MS), Victim::Daemon));
            }
            kills.sort_by_key(|it| it.0);
            kills
        };
        Round {
            starting: phase(),
            running: phase(),
            removing: phase(),
        }
    }
}

/// Starts ten VMs, sends them packets, and removes them.
fn round(daemon: &mut Daemon, number: u64, round: &Round, tally: &mut Tally) {
    let name = |place| format!("vm-{number}-{place}");
    let killed = tally.monitors;
    let started = meanwhile(daemon, &round.starting, tally, |daemon, place| {
        let body = serde_json::to_vec(&run_of(networked(&name(place), place), true)).unwrap();
        ask(daemon, "POST", "/v1/run", &body)
    });
    for answer in started.into_iter().flatten() {
        let done = answer.status == 200;
        tally.ran += usize::from(done);
        let why = String::from_utf8_lossy(&answer.body);
        assert!(done || !round.starting.is_empty(), "round {number}: {why}");
    }
    let run = settled(daemon);
    let addresses: Vec<&String> = run
        .iter()
        .filter_map(|vm| vm.network.as_ref()?.addresses.first())
        .collect();
    let different: BTreeSet<&&String> = addresses.iter().collect();
    assert_eq!(different.len(), addresses.len(), "{addresses:?}");
    for place in 0..AT_ONCE {
        send_to(PORT + place);
    }
    meanwhile(daemon, &round.running, tally, |daemon, _| {
        ask(daemon, "GET", "/v1/vms", b"")
    });
    let running = |vms: &[Vm]| vms.iter().filter(|vm| vm.state == VmState::Running).count();
    let runs = running(&settled(daemon));
    // A monitor may be shown for a moment after its death.
    let most = tally.monitors - killed;
    assert!(runs + most >= running(&run), "round {number}: {runs} run");

    meanwhile(daemon, &round.removing, tally, |daemon, place| {
        let path = format!("/v1/vms/{}?force=true", name(place));
        ask(daemon, "DELETE", &path, b"")
    });
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        let status = daemon
            .delete(&format!("/v1/vms/{}?force=true", vm.id))
            .status;
        assert!(matches!(status, 204 | 404), "round {number}: {status}");
    }
}

/// Sends ten requests at the same time, and kills meanwhile. If the daemon is killed, the next one is
/// up at the end.
fn meanwhile(
    daemon: &mut Daemon,
    kills: &[(u64, Victim)],
    tally: &mut Tally,
    asks: impl Fn(&Daemon, usize) -> io::Result<Answer> + Sync,
) -> Vec<io::Result<Answer>> {
    let here = &*daemon;
    let asks = &asks;
    let answers = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..AT_ONCE)
            .map(|place| scope.spawn(move || asks(here, place)))
            .collect();
        let begun = Instant::now();
        for (after_ms, victim) in kills {
            let at = Duration::from_millis(*after_ms);
            std::thread::sleep(at.saturating_sub(begun.elapsed()));
            match victim {
                Victim::Daemon => {
                    kill(here.pid());
                    tally.daemons += 1;
                }
                Victim::Monitor(place) => {
                    let there = vmms(&here.data);
                    if !there.is_empty() {
                        kill(there[place % there.len()]);
                        tally.monitors += 1;
                    }
                }
            }
        }
        asked.into_iter().map(|it| it.join().unwrap()).collect()
    });
    if kills.iter().any(|it| it.1 == Victim::Daemon) {
        daemon.killed();
        daemon.up();
    }
    answers
}

/// All VMs, once none is starting or stopping.
fn settled(daemon: &Daemon) -> Vec<Vm> {
    let mut all = Vec::new();
    eventually("no VM starts or stops", || {
        all = daemon.get("/v1/vms?all=true").json::<Vec<Vm>>();
        let changes = |vm: &Vm| matches!(vm.state, VmState::Starting | VmState::Stopping);
        !all.iter().any(changes)
    });
    all
}

/// A VM that sends packets, with a published port of both protocols.
fn networked(name: &str, place: usize) -> CreateVm {
    let port = PORT + place;
    let network = NetworkUse {
        ports: vec![format!("{port}:80"), format!("{port}:53/udp")],
        policy: jiffy_wire::api::NetworkPolicy {
            // Chains of its own.
            deny: vec!["192.0.2.0/24".into()],
            ..Default::default()
        },
        ..NetworkUse::default()
    };
    CreateVm {
        kernel_args: Some("fake=queries".into()),
        network,
        ..named(name, quiet())
    }
}

/// Sends packets to a published port, which nobody answers.
fn send_to(port: usize) {
    let at = SocketAddr::from(([127, 0, 0, 1], port as u16));
    let _ = TcpStream::connect_timeout(&at, Duration::from_millis(1));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let _ = socket.send_to(b"?", at);
}

/// What the host has for a node without VMs.
#[derive(Debug)]
struct State {
    files: Left,
    /// Number of the node's processes by their first words.
    processes: BTreeMap<String, usize>,
    network: Traces,
}

impl State {
    fn settled(daemon: &Daemon) -> State {
        let mut last = State::of(daemon);
        eventually("nothing changes any more", || {
            std::thread::sleep(Duration::from_millis(1500));
            let now = State::of(daemon);
            let stays = now.differs_from(&last).is_none();
            last = now;
            stays
        });
        last
    }

    fn of(daemon: &Daemon) -> State {
        let folder = daemon.folder.path().display().to_string();
        let mut own = BTreeMap::new();
        for pid in processes(|line| line.contains(&folder)) {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = line.split('\0').next().unwrap_or_default().to_owned();
            *own.entry(program).or_default() += 1;
        }
        State {
            files: Left::behind(daemon),
            processes: own,
            network: Traces::find().unwrap(),
        }
    }

    fn differs_from(&self, other: &State) -> Option<String> {
        // The link that is made ahead has another name each time.
        let network = |it: &State| Traces {
            links: BTreeSet::new(),
            ..it.network.clone()
        };
        let same = self.files == other.files
            && self.processes == other.processes
            && self.network.links.len() == other.network.links.len()
            && network(self) == network(other);
        (!same).then(|| format!("{self:#?}\ninstead of\n{other:#?}"))
    }

    /// Checks this, and that users and cgroups are those of no VM. Tracked connections are forgotten
    /// a little later than VMs.
    fn assert_unchanged(&self, daemon: &Daemon) {
        assert_matches_vms(daemon);
        let until = Instant::now() + SETTLED;
        while let Some(difference) = State::of(daemon).differs_from(self) {
            assert!(Instant::now() < until, "{difference}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
