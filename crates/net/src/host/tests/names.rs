//! The name server, queried by guests.

use super::world::*;
use super::{on_host, options, spec};
use crate::host::Host;
use crate::names::{Asker, Directory, NameServer, Sockets, resolvers::Resolvers};
use crate::policy::Policy;
use crate::rules::NameRules;
use domain::base::iana::{Class, Rcode, Rtype};
use domain::base::{Message, MessageBuilder, Name, Ttl};
use domain::rdata::A;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::{Arc, Mutex};

/// A resolver that answers every name with the public address.
fn resolver(world: &World) {
    let socket = world
        .outside
        .run(|| UdpSocket::bind((PUBLIC, 53)).expect("a port"));
    std::thread::spawn(move || {
        let mut packet = [0; 2000];
        while let Ok((length, from)) = socket.recv_from(&mut packet) {
            let asked = Message::from_slice(&packet[..length]).expect("a question");
            let builder = MessageBuilder::new_vec();
            let mut answer = builder
                .start_answer(asked, Rcode::NOERROR)
                .expect("an answer");
            let name = asked.sole_question().expect("one");
            let address: Ipv4Addr = PUBLIC.parse().expect("an address");
            let record = (name.qname(), Ttl::from_secs(100), A::new(address));
            answer.push(record).expect("room");
            let _ = socket.send_to(&answer.finish(), from);
        }
    });
}

/// Serves names in the host's namespace until it is stopped.
pub fn serve(
    world: &World,
    directory: Arc<Directory>,
    sockets: Sockets,
    stopped: tokio::sync::oneshot::Receiver<()>,
) {
    world.host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            let resolvers =
                Resolvers::fixed(vec![(PUBLIC.parse::<IpAddr>().expect("it"), 53).into()]);
            let rules = Mutex::new(NameRules::new().expect("a channel"));
            let server = Arc::new(NameServer::new(directory, resolvers, rules));
            tokio::select! {
                ended = server.serve(sockets) => ended.expect("it serves"),
                _ = stopped => {}
            }
        });
    });
}

/// The addresses that a guest gets for a name.
pub fn addresses(guest: &Guest, name: &str) -> Option<Vec<IpAddr>> {
    let mut builder = MessageBuilder::new_vec().question();
    let name = Name::<Vec<u8>>::vec_from_str(name).expect("a name");
    builder.push((name, Rtype::A, Class::IN)).expect("room");
    let gateway = guest.addresses.gateway;
    let answer = guest.namespace.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a socket");
        socket
            .send_to(&builder.finish(), (gateway, 53))
            .expect("sent");
        let mut packet = [0; 2000];
        let (length, from) = socket.recv_from(&mut packet).ok()?;
        assert_eq!(from.to_string(), format!("{gateway}:53"));
        Some(packet[..length].to_vec())
    })?;
    let message = Message::from_slice(&answer).expect("an answer");
    let records = message.answer().expect("records").limit_to_in::<A>();
    Some(
        records
            .map(|it| IpAddr::V4(it.expect("a record").data().addr()))
            .collect(),
    )
}

#[test]
fn guests_resolve_names_at_the_gateway_and_reach_them() {
    let world = World::new();
    resolver(&world);
    let _server = Server::tcp(&world.outside, PUBLIC, 80, "far");
    // The port is taken, so the rules redirect guests to another.
    let _taken = world
        .host
        .run(|| UdpSocket::bind("0.0.0.0:53").expect("a port"));
    let ((mut host, report), sockets) = on_host(&world, || {
        let opened = Host::open(options(), &[], &BTreeSet::new()).expect("open");
        let gateway = opened.0.ranges().gateway();
        let sockets = Sockets::bind(&[gateway.into()], 53).expect("bound");
        assert_ne!(sockets.port, 53);
        drop(opened);
        let options = crate::host::HostOptions {
            name_port: sockets.port,
            ..options()
        };
        (
            Host::open(options, &[], &BTreeSet::new()).expect("open"),
            sockets,
        )
    });
    let directory = Arc::new(Directory::new(report.ranges.gateway(), None));
    let mut start = |number: u32, name: &str, policy: Policy| {
        let attached = on_host(&world, || {
            let mut spec = spec(&mut host, number);
            spec.network = Some("blue".to_owned());
            spec.policy = policy.clone();
            directory.set(Asker {
                vm: spec.vm,
                name: name.to_owned(),
                network: spec.network.clone(),
                policy,
                v4: spec.v4,
                v6: None,
            });
            host.attach(&spec).expect("attached")
        });
        Guest::start(attached)
    };
    let web = start(1, "web", Policy::default());
    let closed = Policy {
        allow: vec!["good.example:80".parse().expect("a rule")],
        deny: vec!["all".parse().expect("a rule")],
    };
    let db = start(2, "db", closed);
    let known = directory.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&world, known, sockets, stopped));
        let far: IpAddr = PUBLIC.parse().expect("an address");
        assert_eq!(addresses(&web, "db"), Some(vec![db.addresses.v4.into()]));
        assert_eq!(
            addresses(&db, "web.jiffy.internal"),
            Some(vec![web.addresses.v4.into()])
        );
        assert_eq!(addresses(&web, "any.example"), Some(vec![far]));
        assert!(!db.reaches(PUBLIC, 80));
        assert_eq!(addresses(&db, "any.example"), Some(vec![]));
        assert!(!db.reaches(PUBLIC, 80));
        assert_eq!(addresses(&db, "good.example"), Some(vec![far]));
        assert!(db.reaches(PUBLIC, 80));
        let _ = stop.send(());
    });
}
