use super::directory::{Asker, Directory, Known};
use super::message::{self, Question, Rejected, Resolved};
use super::opener::Open;
use super::resolvers::Resolvers;
use super::server::NameServer;
use crate::policy::{Access, Policy};
use crate::{Error, VmId};
use domain::base::iana::{Class, Rcode, Rtype};
use domain::base::{Message, MessageBuilder, Name, Ttl};
use domain::rdata::{A, Aaaa, Cname, Txt};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn asker(number: u8, name: &str, network: Option<&str>) -> Asker {
    Asker {
        vm: VmId::parse(&format!("{number:012x}")).expect("an id"),
        name: name.to_owned(),
        network: network.map(str::to_owned),
        policy: Policy::default(),
        v4: Ipv4Addr::new(10, 118, 0, number),
        v6: Some(format!("fd01::{number:x}").parse().expect("an address")),
    }
}

fn question(name: &str, kind: Rtype, udp_bytes: Option<u16>) -> Vec<u8> {
    let mut builder = MessageBuilder::new_vec();
    builder.header_mut().set_id(77);
    builder.header_mut().set_rd(true);
    let mut builder = builder.question();
    let name = Name::<Vec<u8>>::vec_from_str(name).expect("a name");
    builder.push((name, kind, Class::IN)).expect("room");
    let mut builder = builder.additional();
    if let Some(bytes) = udp_bytes {
        let sized = builder.opt(|opt| {
            opt.set_udp_payload_size(bytes);
            Ok(())
        });
        sized.expect("room");
    }
    builder.finish()
}

/// Code and addresses of an answer.
fn said(answer: &[u8]) -> (Rcode, Vec<IpAddr>) {
    let message = Message::from_slice(answer).expect("an answer");
    assert_eq!(message.header().id(), 77);
    assert!(message.header().qr() && message.header().ra());
    let records = message.answer().expect("records");
    let addresses =
        records.limit_to_in::<domain::rdata::AllRecordData<_, domain::base::ParsedName<_>>>();
    let addresses = addresses.filter_map(|it| match it.expect("a record").data() {
        domain::rdata::AllRecordData::A(it) => Some(IpAddr::V4(it.addr())),
        domain::rdata::AllRecordData::Aaaa(it) => Some(IpAddr::V6(it.addr())),
        _ => None,
    });
    (message.header().rcode(), addresses.collect())
}

#[test]
fn vm_names_resolve_only_within_one_network() {
    let directory = Directory::new(Ipv4Addr::new(10, 118, 0, 1), None);
    let (web, db, other) = (
        asker(2, "Web", Some("blue")),
        asker(3, "db", Some("blue")),
        asker(4, "db", None),
    );
    for one in [&web, &db, &other] {
        directory.set(one.clone());
    }
    let look_up = |who: &Asker, name: &str| directory.look_up(who, name);
    let addresses =
        |it: &Asker| Known::Addresses(vec![IpAddr::V4(it.v4), IpAddr::V6(it.v6.expect("one"))]);
    for name in ["web", "web.jiffy.internal"] {
        assert_eq!(look_up(&db, name), addresses(&web));
        assert_eq!(look_up(&web, name), addresses(&web));
        assert_eq!(look_up(&other, name), Known::Absent);
    }
    assert_eq!(look_up(&web, "db"), addresses(&db));
    assert_eq!(look_up(&other, "db"), addresses(&other));
    assert_eq!(look_up(&web, "db.example.com"), Known::Nothing);
    assert_eq!(look_up(&web, "xjiffy.internal"), Known::Nothing);
    assert_eq!(
        look_up(&web, "jiffy.internal"),
        Known::Addresses(Vec::new())
    );
    let host = Known::Addresses(vec![IpAddr::from([10, 118, 0, 1])]);
    assert_eq!(look_up(&web, "host.jiffy.internal"), host);
    let name = Known::Name("Web.jiffy.internal".to_owned());
    assert_eq!(look_up(&db, "2.0.118.10.in-addr.arpa"), name);
    let reversed = format!("2.{}1.0.d.f.ip6.arpa", "0.".repeat(27));
    assert_eq!(look_up(&db, &reversed), name);
    assert_eq!(look_up(&other, "2.0.118.10.in-addr.arpa"), Known::Absent);
    assert_eq!(look_up(&db, "8.8.8.8.in-addr.arpa"), Known::Nothing);

    // After a change of name and address, the old ones are unknown.
    let mut moved = web.clone();
    moved.v4 = Ipv4Addr::new(10, 118, 0, 9);
    moved.name = "www".to_owned();
    directory.set(moved);
    assert_eq!(look_up(&db, "web"), Known::Absent);
    assert!(directory.asker(web.v4.into()).is_none());
    directory.remove(web.vm);
    assert_eq!(look_up(&db, "www"), Known::Absent);
    assert!(directory.asker([10, 118, 0, 9].into()).is_none());
}

#[test]
fn invalid_queries_get_an_error_or_no_answer() {
    assert_eq!(message::read(&[]).err(), Some(Rejected::Silence));
    assert_eq!(message::read(&[0; 11]).err(), Some(Rejected::Silence));
    let mut answer = question("example.com", Rtype::A, None);
    answer[2] |= 0x80;
    assert_eq!(message::read(&answer).err(), Some(Rejected::Silence));
    let code = |bytes: &[u8]| match message::read(bytes) {
        Err(Rejected::Answer(answer)) => said(&answer).0,
        other => panic!("{other:?}"),
    };
    let mut update = question("example.com", Rtype::A, None);
    update[2] |= 5 << 3;
    assert_eq!(code(&update), Rcode::NOTIMP);
    let mut none = question("example.com", Rtype::A, None);
    none[5] = 0;
    assert_eq!(code(&none), Rcode::FORMERR);
    assert_eq!(
        code(&question("example.com", Rtype::AXFR, None)),
        Rcode::NOTIMP
    );
    assert_eq!(
        code(&question("example.com", Rtype::ANY, None)),
        Rcode::NOTIMP
    );
    let mut cut = question("example.com", Rtype::A, None);
    cut.truncate(20);
    assert_eq!(code(&cut), Rcode::FORMERR);
    let long = vec![0; message::QUESTION_BYTES + 1];
    assert_eq!(message::read(&long).err(), Some(Rejected::Silence));
    let bytes = question("Example.COM", Rtype::A, Some(9000));
    let read = message::read(&bytes).expect("a question");
    assert_eq!(
        (read.name.as_str(), read.udp_bytes),
        ("example.com", message::UDP_BYTES)
    );
}

/// A resolver whose answer depends on the name.
struct Fake {
    at: SocketAddr,
    asked: Arc<AtomicUsize>,
}

fn fake_answer(bytes: &[u8], tcp: bool) -> Vec<u8> {
    let asked = Message::from_slice(bytes).expect("a question");
    let question = asked.sole_question().expect("one");
    let name = question.qname().to_string();
    let code = match name.as_str() {
        "absent.example" => Rcode::NXDOMAIN,
        "failing.example" => Rcode::SERVFAIL,
        _ => Rcode::NOERROR,
    };
    let builder = MessageBuilder::new_vec();
    let mut answer = builder.start_answer(asked, code).expect("an answer");
    let ttl = Ttl::from_secs(if name == "short.example" { 0 } else { 100 });
    match name.as_str() {
        "large.example" if !tcp => answer.header_mut().set_tc(true),
        "large.example" => {
            for number in 0..200 {
                let address = A::new(Ipv4Addr::new(203, 0, 113, number));
                answer.push((question.qname(), ttl, address)).expect("room");
            }
        }
        "text.example" => {
            let text = Txt::<Vec<u8>>::build_from_slice(b"hello").expect("text");
            answer.push((question.qname(), ttl, text)).expect("room");
        }
        "inner.example" => {
            for address in [[10, 0, 0, 1], [169, 254, 169, 254], [203, 0, 113, 1]] {
                let address = A::new(Ipv4Addr::from(address));
                answer.push((question.qname(), ttl, address)).expect("room");
            }
        }
        _ if code == Rcode::NOERROR => {
            let other = Name::<Vec<u8>>::vec_from_str("other.example").expect("a name");
            answer
                .push((question.qname(), ttl, Cname::new(&other)))
                .expect("room");
            if question.qtype() == Rtype::AAAA {
                let address: std::net::Ipv6Addr = "2001:db8::9".parse().expect("an address");
                answer
                    .push((&other, ttl, Aaaa::new(address)))
                    .expect("room");
            } else {
                let address = A::new(Ipv4Addr::new(203, 0, 113, 9));
                answer.push((&other, ttl, address)).expect("room");
            }
        }
        _ => {}
    }
    answer.finish()
}

impl Fake {
    fn start() -> Fake {
        // A port that is free for UDP may be in use for TCP.
        let (udp, at, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
            let at = udp.local_addr().expect("an address");
            if let Ok(tcp) = TcpListener::bind(at) {
                break (udp, at, tcp);
            }
        };
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        std::thread::spawn(move || {
            let mut packet = [0; 2000];
            while let Ok((length, from)) = udp.recv_from(&mut packet) {
                count.fetch_add(1, Ordering::SeqCst);
                // A forged answer with another id comes first; it must be ignored.
                let mut forged = fake_answer(&packet[..length], false);
                forged[0] ^= 1;
                let _ = udp.send_to(&forged, from);
                let _ = udp.send_to(&fake_answer(&packet[..length], false), from);
            }
        });
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = tcp.accept() {
                let mut length = [0; 2];
                stream.read_exact(&mut length).expect("a length");
                let mut asked = vec![0; u16::from_be_bytes(length).into()];
                stream.read_exact(&mut asked).expect("a question");
                let answer = fake_answer(&asked, true);
                let length = (answer.len() as u16).to_be_bytes();
                let _ = stream.write_all(&[&length[..], &answer].concat());
            }
        });
        Fake { at, asked }
    }
}

/// Records opened addresses.
#[derive(Clone, Default)]
struct Opened(Arc<Mutex<Vec<(VmId, IpAddr)>>>);

impl Open for Opened {
    fn open(&self, vm: VmId, _: Access, addresses: &[(IpAddr, Duration)]) -> Result<(), Error> {
        let mut opened = self.0.lock().expect("nobody panicked");
        opened.extend(addresses.iter().map(|it| (vm, it.0)));
        Ok(())
    }
}

#[tokio::test]
async fn other_names_are_resolved_cached_and_opened_by_policy() {
    let fake = Fake::start();
    let opened = Opened::default();
    let directory = Arc::new(Directory::new(Ipv4Addr::new(10, 118, 0, 1), None));
    let resolvers = Resolvers::fixed(vec![fake.at]);
    let server = NameServer::new(directory.clone(), resolvers, opened.clone());
    let open = asker(2, "a", None);
    let mut closed = asker(3, "b", None);
    closed.policy = Policy {
        allow: ["good.example", "inner.example"]
            .map(|it| it.parse().expect("a rule"))
            .into(),
        deny: vec!["all".parse().expect("a rule")],
    };
    let ask = async |who: &Asker, name: &str, kind: Rtype, tcp: bool| {
        let question = question(name, kind, None);
        server.answer(who, &question, tcp).await.expect("an answer")
    };
    let far: IpAddr = [203, 0, 113, 9].into();
    let good = ask(&open, "Good.example", Rtype::A, false).await;
    assert_eq!(said(&good), (Rcode::NOERROR, vec![far]));
    assert_eq!(fake.asked.load(Ordering::SeqCst), 1);
    assert_eq!(opened.0.lock().expect("a list").len(), 0);
    // Now the answer is cached, for all VMs that may resolve the name.
    let good = ask(&closed, "good.example", Rtype::A, false).await;
    assert_eq!(said(&good), (Rcode::NOERROR, vec![far]));
    assert_eq!(*opened.0.lock().expect("a list"), [(closed.vm, far)]);
    assert_eq!(fake.asked.load(Ordering::SeqCst), 1);
    ask(&open, "good.example", Rtype::AAAA, false).await;
    ask(&open, "short.example", Rtype::A, false).await;
    ask(&open, "short.example", Rtype::A, false).await;
    assert_eq!(fake.asked.load(Ordering::SeqCst), 4);

    // A name that is not allowed is not sent to a resolver.
    let bad = ask(&closed, "bad.example", Rtype::A, false).await;
    assert_eq!(said(&bad), (Rcode::NXDOMAIN, vec![]));
    assert_eq!(fake.asked.load(Ordering::SeqCst), 4);
    // Of a name with internal addresses, only the public ones are opened.
    opened.0.lock().expect("a list").clear();
    let inner = ask(&closed, "inner.example", Rtype::A, false).await;
    assert_eq!(said(&inner).1.len(), 3);
    assert_eq!(
        *opened.0.lock().expect("a list"),
        [(closed.vm, [203, 0, 113, 1].into())]
    );

    // The policy has changed since the question came: nothing is opened any more.
    opened.0.lock().expect("a list").clear();
    directory.set(Asker {
        policy: Policy::default(),
        ..closed.clone()
    });
    ask(&closed, "good.example", Rtype::A, false).await;
    assert_eq!(opened.0.lock().expect("a list").len(), 0);

    let absent = ask(&open, "absent.example", Rtype::A, false).await;
    assert_eq!(said(&absent), (Rcode::NXDOMAIN, vec![]));
    let failing = ask(&open, "failing.example", Rtype::A, false).await;
    assert_eq!(said(&failing).0, Rcode::SERVFAIL);
    let text = ask(&open, "text.example", Rtype::TXT, false).await;
    assert!(text.windows(5).any(|it| it == b"hello"));
    // A too large answer is truncated by UDP and complete by TCP.
    let cut = ask(&open, "large.example", Rtype::A, false).await;
    assert!(Message::from_slice(&cut).expect("an answer").header().tc());
    assert!(cut.len() <= 512);
    let whole = ask(&open, "large.example", Rtype::A, true).await;
    assert_eq!(said(&whole).1.len(), 200);
    // Only so many of its addresses are opened.
    let mut some = asker(5, "c", None);
    some.policy.allow = vec!["large.example".parse().expect("a rule")];
    some.policy.deny = vec!["all".parse().expect("a rule")];
    ask(&some, "large.example", Rtype::A, true).await;
    assert_eq!(opened.0.lock().expect("a list").len(), 128);
}

#[tokio::test]
async fn queries_without_a_resolver_get_servfail() {
    let gone = UdpSocket::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("it");
    let directory = Arc::new(Directory::new(Ipv4Addr::new(10, 118, 0, 1), None));
    let server = NameServer::new(directory, Resolvers::fixed(vec![gone]), Opened::default());
    let question = question("good.example", Rtype::A, None);
    let answer = server.answer(&asker(2, "a", None), &question, false).await;
    assert_eq!(said(&answer.expect("an answer")).0, Rcode::SERVFAIL);
}

fn resolved(name: &str, bytes: usize) -> (Vec<u8>, Resolved) {
    let asked = question(name, Rtype::TXT, None);
    let read = message::read(&asked).expect("a question");
    let forwarded = read.forward(1).expect("a question");
    let message = Message::from_slice(&forwarded).expect("a question");
    let builder = MessageBuilder::new_vec();
    let mut answer = builder
        .start_answer(message, Rcode::NOERROR)
        .expect("an answer");
    let text = Txt::<Vec<u8>>::build_from_slice(&vec![b'x'; bytes]).expect("text");
    let name = message.sole_question().expect("one");
    answer
        .push((name.qname(), Ttl::from_secs(100), text))
        .expect("room");
    let answer = answer.finish();
    let resolved = message::read_answer(&read, 1, &answer).expect("an answer");
    (asked, resolved)
}

#[test]
fn the_cache_is_bounded_and_drops_expired_answers() {
    let mut cache = super::cache::Cache::default();
    let start = std::time::Instant::now();
    for number in 0..10_000 {
        let name = format!("{number}.example");
        let (_, resolved) = resolved(&name, 2000);
        cache.put(&name, Rtype::TXT, Arc::new(resolved), start);
    }
    assert!(cache.len() > 1000 && cache.len() < 2100, "{}", cache.len());
    assert!(cache.get("0.example", Rtype::TXT, start).is_none());
    let last = "9999.example";
    assert!(
        cache
            .get(last, Rtype::TXT, start + Duration::from_secs(99))
            .is_some()
    );
    assert!(
        cache
            .get(last, Rtype::TXT, start + Duration::from_secs(100))
            .is_none()
    );
    assert!(cache.get(last, Rtype::A, start).is_none());
    // Repeating one answer takes no more space.
    for _ in 0..10_000 {
        let (_, resolved) = resolved(last, 10);
        cache.put(last, Rtype::TXT, Arc::new(resolved), start);
    }
    assert!(cache.get(last, Rtype::TXT, start).is_some());
}

#[test]
fn the_ttl_of_a_cached_answer_decreases() {
    let (asked, resolved) = resolved("text.example", 10);
    let question: Question = message::read(&asked).expect("a question");
    let ttl = |age| {
        let answer = question
            .relay(&resolved, Duration::from_secs(age), 512)
            .expect("an answer");
        let message = Message::from_slice(&answer).expect("an answer");
        let record = message.answer().expect("records").next();
        record.expect("one").expect("a record").ttl().as_secs()
    };
    assert_eq!((ttl(0), ttl(40), ttl(400)), (100, 60, 0));
}

proptest! {
    #[test]
    fn any_query_bytes_give_an_answer_within_the_size_limit(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        flip in 0usize..40, to: u8,
    ) {
        let mut damaged = question("web.jiffy.internal", Rtype::A, Some(1232));
        let length = damaged.len();
        damaged[flip % length] = to;
        let directory = Directory::new(Ipv4Addr::new(10, 118, 0, 1), None);
        let web = asker(2, "web", None);
        directory.set(web.clone());
        for bytes in [&bytes, &damaged] {
            if let Ok(question) = message::read(bytes) {
                let known = directory.look_up(&web, &question.name);
                if let Some(answer) = question.own(&known) {
                    prop_assert!(answer.len() < 1232);
                }
                prop_assert!(question.forward(1).is_some());
            }
        }
        let (asked, _) = resolved("text.example", 10);
        let question = message::read(&asked).expect("a question");
        if let Some(resolved) = message::read_answer(&question, 1, &bytes) {
            question.relay(&resolved, Duration::ZERO, 512);
        }
    }
}
