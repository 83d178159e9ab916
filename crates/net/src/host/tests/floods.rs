//! A VM that sends as fast as it can: what it shares with others stays available to them.

use super::frames::{echo, ethernet, syn, udp4};
use super::names::{addresses, serve};
use super::world::*;
use super::{on_host, open, spec, vm};
use crate::conntrack;
use crate::host::{Attached, Host};
use crate::links::found;
use crate::names::{Asker, Directory, Sockets};
use crate::netlink::Channel;
use crate::rules::table::{Base, Connections};
use crate::rules::{Counted, TABLE, netfilter};
use jiffy_sys::tap::{Tap, TapOptions};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, set_name};
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// An address of the outside that drops what it gets.
const SILENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
/// The least time and number of packets of a flood.
const LASTS: Duration = Duration::from_secs(1);
const PACKETS: u64 = 20_000;

/// A host with a VM that floods and is not read, and another guest.
struct Scene {
    world: World,
    host: Host,
    flooder: Attached,
    victim: Guest,
}

impl Scene {
    fn new() -> Scene {
        let world = World::new();
        let (mut host, _) = open(&world);
        let (flooder, victim) = on_host(&world, || {
            let (a, b) = (spec(&mut host, 1), spec(&mut host, 2));
            let flooder = host.attach(&a).expect("attached");
            (flooder, host.attach(&b).expect("attached"))
        });
        Scene {
            victim: Guest::start(victim),
            world,
            host,
            flooder,
        }
    }

    fn counted(&mut self) -> Counted {
        on_host(&self.world, || {
            self.host.counters(vm(1)).expect("counters").1
        })
    }

    /// Begins a flood of IPv4 packets, made from their numbers.
    fn flood(&self, packet: impl Fn(u64) -> Vec<u8> + Send + 'static) -> Flood {
        let mac = self.flooder.addresses.mac;
        let tap = &self.flooder.tap.queues[0];
        Flood::begin(tap, move |number| ethernet(mac, 0x0800, &packet(number)))
    }

    /// Number of tracked connections from this address.
    fn connections_of(&self, source: Ipv4Addr) -> usize {
        let all = on_host(&self.world, || {
            conntrack::list(&mut netfilter().expect("a socket")).expect("connections")
        });
        all.iter()
            .filter(|it| it.source == IpAddr::V4(source))
            .count()
    }

    fn limit_connections(&mut self, connections: Connections) {
        let rules = &mut self.host.rules;
        let base = Base {
            connections,
            ..rules.base().clone()
        };
        let guests = rules.guests().cloned().collect();
        self.world.host.run(|| {
            rules
                .replace(base, BTreeSet::new(), guests)
                .expect("replaced")
        });
    }
}

/// A thread that writes frames to a TAP.
struct Flood {
    end: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Flood {
    fn begin(tap: &OwnedFd, frame: impl Fn(u64) -> Vec<u8> + Send + 'static) -> Flood {
        let tap = tap.try_clone().expect("a descriptor");
        let end = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        let (ends, count) = (end.clone(), sent.clone());
        let thread = thread::spawn(move || {
            set_name(c"flooder").expect("a name");
            pin(0);
            while !ends.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                rustix::io::write(&tap, &frame(number)).expect("sent");
                count.store(number + 1, Ordering::Relaxed);
            }
        });
        Flood { end, sent, thread }
    }

    /// Whether it has sent so many frames.
    fn has_sent(&self, least: u64) -> bool {
        self.sent.load(Ordering::Relaxed) >= least
    }

    /// Waits until it has lasted long enough.
    fn lasts(&self) {
        thread::sleep(LASTS);
        while !self.has_sent(PACKETS) {
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends it; returns the number of frames.
    fn stop(self) -> u64 {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().expect("it ends");
        self.sent.load(Ordering::Relaxed)
    }
}

/// Runs this thread on the first or another of its processors.
fn pin(place: usize) {
    let mine = sched_getaffinity(None).expect("processors");
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|it| mine.is_set(*it)).collect();
    let mut one = CpuSet::new();
    one.set(all[place % all.len()]);
    sched_setaffinity(None, &one).expect("pinned");
}

/// A port for each number, all of them in turn.
fn port(number: u64) -> u16 {
    1024 + (number % 64_000) as u16
}

#[test]
fn all_packets_of_a_flood_are_counted() {
    let mut scene = Scene::new();
    let own = scene.flooder.addresses.v4;
    let other = scene.victim.addresses.v4;
    let private: Ipv4Addr = PRIVATE.parse().expect("an address");
    let spoofs = scene.flood(move |it| udp4((other, port(it)), (SILENT, 9)));
    spoofs.lasts();
    let spoofed = spoofs.stop();
    assert_eq!(scene.counted().spoofed, spoofed);
    let begun = Instant::now();
    let refusals = scene.flood(move |it| match it % 3 {
        0 => udp4((own, port(it)), (private, 9)),
        1 => syn((own, port(it)), (private, 9)),
        _ => echo(own, port(it), private),
    });
    refusals.lasts();
    let refused = refusals.stop();
    let took = begun.elapsed();
    assert_eq!(scene.counted().refused, refused);
    assert_eq!(scene.counted().limited, 0);
    assert_eq!(scene.connections_of(own), 0);
    // It got few answers.
    let mut answers = 0;
    let mut packet = vec![0; 2048];
    while rustix::io::read(&scene.flooder.tap.queues[0], &mut packet).is_ok() {
        answers += 1;
    }
    let most = 100 + 100 * (took.as_secs() + 1);
    assert!((50..=most).contains(&answers), "{answers} of {most}");
    assert!(refused > 10 * most, "{refused} is no flood");
}

#[test]
fn a_flood_of_connections_leaves_room_for_those_of_others() {
    let mut scene = Scene::new();
    let _server = Server::tcp(&scene.world.outside, PUBLIC, 80, "far");
    let own = scene.flooder.addresses.v4;
    let silent_at = |it: u64| Ipv4Addr::from_bits(SILENT.to_bits() + it as u32 % 100);
    // No two packets belong to one connection.
    let silent = move |it: u64| match it % 3 {
        0 => udp4((own, port(it)), (SILENT, 1000 + (it / 64_000) as u16)),
        1 => syn((own, port(it)), (SILENT, 1000 + (it / 64_000) as u16)),
        _ => echo(own, it as u16, silent_at(it >> 16)),
    };
    let reaches_all = |scene: &Scene| (0..30).all(|_| scene.victim.reaches(PUBLIC, 80));

    // As many new ones as are allowed each second; all others are counted.
    let allowed = Connections {
        open: 1 << 20,
        new: 50,
    };
    scene.limit_connections(allowed);
    let (begun, before) = (Instant::now(), scene.counted());
    let flood = scene.flood(silent);
    assert!(reaches_all(&scene));
    flood.lasts();
    let sent = flood.stop();
    let took = begun.elapsed();
    let admitted = sent - (scene.counted().limited - before.limited);
    assert_eq!(scene.connections_of(own) as u64, admitted);
    let most = 4 * 50 + 50 * (took.as_secs() + 1);
    assert!((200..=most).contains(&admitted), "{admitted} of {most}");
    assert!(sent > 10 * most, "{sent} are no flood");

    // As many open ones as are allowed.
    let allowed = Connections {
        open: 1280,
        new: 5000,
    };
    scene.limit_connections(allowed);
    let flood = scene.flood(silent);
    assert!(reaches_all(&scene));
    flood.lasts();
    flood.stop();
    let open = scene.connections_of(own);
    assert!((1280..=1280 + admitted as usize).contains(&open), "{open}");
    assert!(reaches_all(&scene));

    // The counts end with the connections.
    on_host(&scene.world, || {
        scene.host.detach(vm(1)).expect("detached");
        scene.host.forget_released().expect("forgotten");
    });
    let end = Instant::now() + Duration::from_secs(60);
    let link = scene.flooder.tap.index.to_ne_bytes();
    loop {
        let counts = on_host(&scene.world, || {
            let netfilter = &mut netfilter().expect("a socket");
            crate::nft::read::elements(netfilter, TABLE, "connections").expect("elements")
        });
        if !counts.iter().any(|it| it.key.starts_with(&link)) {
            break;
        }
        assert!(Instant::now() < end, "{} are left", counts.len());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_flood_does_not_fill_the_hosts_table_of_neighbours() {
    let scene = Scene::new();
    let own = scene.flooder.addresses.v4;
    let begun = Instant::now();
    // Addresses in the network of the host's link, which nobody has.
    let flood = scene.flood(move |it| {
        let absent = Ipv4Addr::new(198, 51, 100, 3 + (it % 250) as u8);
        udp4((own, 9), (absent, 9))
    });
    flood.lasts();
    let neighbours = on_host(&scene.world, || {
        let mut channel = Channel::route().expect("a socket");
        found::neighbours(&mut channel, index("up0")).expect("neighbours")
    });
    flood.stop();
    let most = 100 + 20 * (begun.elapsed().as_secs() + 1);
    let found = neighbours.len() as u64;
    assert!((100..=most).contains(&found), "{found} of {most}");
}

#[test]
fn a_flood_of_queries_delays_no_query_of_others() {
    let mut scene = Scene::new();
    let gateway = scene.victim.addresses.gateway;
    let own = scene.flooder.addresses.v4;
    let sockets = on_host(&scene.world, || {
        Sockets::bind(&[gateway.into()], 53).expect("bound")
    });
    assert_eq!(sockets.port, 53);
    let directory = Arc::new(Directory::new(gateway, None));
    for (number, v4) in [(1, own), (2, scene.victim.addresses.v4)] {
        directory.set(Asker {
            vm: vm(number),
            name: format!("vm{number}"),
            network: None,
            policy: Default::default(),
            v4,
            v6: None,
        });
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let mut took = Vec::new();
    thread::scope(|scope| {
        let world = &scene.world;
        scope.spawn(move || serve(world, directory, sockets, stopped));
        // In one connection, and in as many as possible.
        for ports in [1, u64::MAX] {
            let flood = scene.flood(move |it| udp4((own, port(it % ports)), (gateway, 53)));
            for _ in 0..50 {
                let asked = Instant::now();
                let answer = addresses(&scene.victim, "vm2");
                assert_eq!(answer, Some(vec![scene.victim.addresses.v4.into()]));
                took.push(asked.elapsed());
            }
            flood.lasts();
            flood.stop();
        }
        let _ = stop.send(());
    });
    took.sort();
    eprintln!("queries took {:?}, at most {:?}", took[50], took[99]);
    assert!(scene.counted().limited > 10_000);
}

/// Name of the threads of the victim, inherited by the threads that they start.
const VICTIM: &str = "victim";

/// Processor time of the victim's threads, nanoseconds.
fn victims_time() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").expect("tasks").flatten();
    let of_victim = tasks.filter(|it| {
        let name = fs::read_to_string(it.path().join("comm"));
        name.is_ok_and(|it| it.trim_end() == VICTIM)
    });
    let times = of_victim.map(|it| {
        let spent = fs::read_to_string(it.path().join("schedstat")).unwrap_or_default();
        let spent = spent.split(' ').next().and_then(|it| it.parse().ok());
        spent.unwrap_or(0u64)
    });
    times.sum()
}

/// A TAP in a namespace of its own, to which a flood is as much work but meets nobody.
fn elsewhere() -> (Namespace, OwnedFd) {
    let namespace = Namespace::new();
    let tap = namespace.run(|| {
        let mut tap = Tap::create(&TapOptions {
            name: c"tap0",
            queues: 1,
            owner: None,
            offloads: true,
            persistent: false,
        })
        .expect("a TAP");
        configure(|batch| up(batch, tap.index));
        tap.queues.remove(0)
    });
    (namespace, tap)
}

#[test]
fn a_flood_costs_others_no_time() {
    const SLICE: Duration = Duration::from_millis(25);
    const SLICES: usize = 15;
    const LEAST: u64 = 500;
    /// Percent of the time beside the same load elsewhere.
    const MOST: u64 = 110;
    /// How often it is measured again: the computer may be busy otherwise.
    const TRIES: usize = 3;
    set_name(c"victim").expect("a name");
    pin(1);
    let mut scene = Scene::new();
    let _echo = Server::udp(&scene.world.outside, PUBLIC, 7, "far");
    // The first packets may be lost, until the host's link is ready; TCP sends them again.
    let _server = Server::tcp(&scene.world.outside, PUBLIC, 80, "far");
    assert!(scene.victim.reaches(PUBLIC, 80));
    let (own, other) = (scene.flooder.addresses.v4, scene.victim.addresses.v4);
    let gateway = scene.flooder.addresses.gateway;
    let [public, private]: [Ipv4Addr; 2] = [PUBLIC, PRIVATE].map(|it| it.parse().expect("it"));
    let host: Ipv4Addr = HOST.parse().expect("an address");
    type Packet = fn([Ipv4Addr; 2], u64) -> Vec<u8>;
    let kinds: [(&str, [Ipv4Addr; 2], Packet); 7] = [
        ("spoofed", [other, public], |[from, to], it| {
            udp4((from, port(it)), (to, 9))
        }),
        ("refused UDP", [own, private], |[from, to], it| {
            udp4((from, port(it)), (to, 9))
        }),
        ("refused TCP", [own, private], |[from, to], it| {
            syn((from, port(it)), (to, 9))
        }),
        ("ports of the host", [own, host], |[from, to], it| {
            syn((from, port(it)), (to, 8080))
        }),
        ("connections", [own, SILENT], |[from, to], it| {
            syn((from, port(it)), (to, 9))
        }),
        ("echo requests", [own, public], |[from, to], it| {
            echo(from, it as u16, to)
        }),
        ("queries", [own, gateway], |[from, to], it| {
            udp4((from, port(it)), (to, 53))
        }),
    ];
    let (_namespace, apart) = elsewhere();
    let mac = scene.flooder.addresses.mac;
    let near = &scene.flooder.tap.queues[0];
    let socket = scene.victim.namespace.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a socket");
        socket.connect((PUBLIC, 7)).expect("a route");
        socket
    });
    // Nanoseconds of processor time for a round trip.
    let round_trip = |tap: &OwnedFd, addresses, packet: Packet| {
        let flood = Flood::begin(tap, move |it| ethernet(mac, 0x0800, &packet(addresses, it)));
        let (begun, before) = (Instant::now(), victims_time());
        let mut trips = 0;
        while begun.elapsed() < SLICE || !flood.has_sent(LEAST) {
            socket.send(b"?").expect("sent");
            socket.recv(&mut [0; 64]).expect("an answer, none is lost");
            trips += 1;
        }
        let spent = victims_time() - before;
        flood.stop();
        spent / trips
    };
    for (kind, addresses, packet) in kinds {
        // Each is compared with the one just before, so that other load changes little between.
        let ratio = || {
            let pairs = (0..SLICES).map(|_| {
                let alone = round_trip(&apart, addresses, packet);
                round_trip(near, addresses, packet) * 100 / alone
            });
            let mut pairs: Vec<u64> = pairs.collect();
            pairs.sort();
            pairs[SLICES / 2]
        };
        let mut tried = Vec::new();
        while tried.len() < TRIES && tried.iter().all(|it| *it > MOST) {
            tried.push(ratio());
        }
        eprintln!("{kind}: a round trip took {tried:?} % of the time without a flood");
        assert!(tried.iter().any(|it| *it <= MOST), "{kind}: {tried:?} %");
    }
    assert!(scene.counted().limited > 0);
}
