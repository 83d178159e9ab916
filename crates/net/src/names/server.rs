//! The name server's sockets, and its limits.

use super::cache::Cache;
use super::directory::{Asker, Directory, Known};
use super::message::{self, ANSWER_BYTES, QUESTION_BYTES, Question, Rejected, Resolved};
use super::opener::{Open, Opener};
use super::resolvers::Resolvers;
use crate::VmId;
use crate::policy::opened_by_name;
use domain::base::iana::Rcode;
use jiffy_sys::backlog;
use jiffy_sys::mutex::lock;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Most questions in progress, in all and of one VM. Beyond this, UDP questions are dropped (a
/// guest's resolver repeats them), and TCP connections are closed.
const QUESTIONS: usize = 512;
const QUESTIONS_OF_ONE: usize = 32;
/// Room for queries that wait in a socket: about a thousand, where the default has room for some
/// dozens.
const QUEUE_BYTES: usize = 2 << 20;
/// How long a connection may be idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most questions on one connection.
const ON_ONE_CONNECTION: usize = 64;
/// An address stays open a little longer than its TTL, because a program may resolve the name at
/// the last moment and connect afterwards.
const GRACE: Duration = Duration::from_secs(10);
/// Most addresses of one answer that are opened. An answer by UDP has no more.
const OPENED_MAX: usize = 128;
/// Pause after a socket error that may persist, such as no free descriptors.
const AFTER_ERROR: Duration = Duration::from_millis(50);

/// Bound sockets.
#[derive(Debug)]
pub struct Sockets {
    udp: Vec<StdUdp>,
    tcp: Vec<StdListener>,
    /// The port they are bound to.
    pub port: u16,
}

impl Sockets {
    /// Binds this port at these addresses. If it is in use, binds another port, and the rules
    /// redirect guests to it ([`crate::host::HostOptions::name_port`]).
    ///
    /// # Errors
    ///
    /// If an address can't be bound for UDP and TCP: at `port`, or, if that is in use, at any of 16
    /// others.
    pub fn bind(addresses: &[IpAddr], port: u16) -> io::Result<Sockets> {
        match Sockets::bind_all(addresses, port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                // A port that is free on the first address may be in use on the second.
                let mut last = error;
                for _ in 0..16 {
                    let first = addresses
                        .first()
                        .copied()
                        .ok_or(io::ErrorKind::InvalidInput)?;
                    let free = StdUdp::bind((first, 0))?.local_addr()?.port();
                    match Sockets::bind_all(addresses, free) {
                        Ok(sockets) => return Ok(sockets),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
            other => other,
        }
    }

    fn bind_all(addresses: &[IpAddr], port: u16) -> io::Result<Sockets> {
        let mut sockets = Sockets {
            udp: Vec::new(),
            tcp: Vec::new(),
            port,
        };
        for address in addresses {
            let at = SocketAddr::new(*address, port);
            let (udp, tcp) = (StdUdp::bind(at)?, StdListener::bind(at)?);
            // Best effort: only with CAP_NET_ADMIN may it be larger than the host's limit.
            let _ = set_socket_recv_buffer_size_force(&udp, QUEUE_BYTES);
            udp.set_nonblocking(true)?;
            backlog::enlarge(&tcp)?;
            tcp.set_nonblocking(true)?;
            sockets.udp.push(udp);
            sockets.tcp.push(tcp);
        }
        Ok(sockets)
    }
}

/// The name server of VMs.
pub struct NameServer {
    directory: Arc<Directory>,
    resolvers: Resolvers,
    opener: Opener,
    cache: Mutex<Cache>,
    asked: Mutex<HashMap<VmId, usize>>,
}

impl NameServer {
    /// A server that knows the VMs of `directory`, asks `resolvers` about other names, and opens
    /// addresses with `open`.
    pub fn new(directory: Arc<Directory>, resolvers: Resolvers, open: impl Open) -> NameServer {
        NameServer {
            opener: Opener::new(directory.clone(), open),
            directory,
            resolvers,
            cache: Mutex::default(),
            asked: Mutex::default(),
        }
    }

    /// Answers until it is dropped.
    ///
    /// # Errors
    ///
    /// If tokio can't register a socket.
    pub async fn serve(self: Arc<Self>, sockets: Sockets) -> io::Result<()> {
        let mut tasks = JoinSet::new();
        for socket in sockets.udp {
            let socket = Arc::new(UdpSocket::from_std(socket)?);
            tasks.spawn(self.clone().serve_udp(socket));
        }
        for listener in sockets.tcp {
            let listener = TcpListener::from_std(listener)?;
            tasks.spawn(self.clone().serve_tcp(listener));
        }
        while tasks.join_next().await.is_some() {}
        Ok(())
    }

    async fn serve_udp(self: Arc<Self>, socket: Arc<UdpSocket>) {
        // The tasks end with the socket.
        let mut answers = JoinSet::new();
        let mut packet = [0; QUESTION_BYTES + 1];
        loop {
            while answers.try_join_next().is_some() {}
            let (length, from) = match socket.recv_from(&mut packet).await {
                Ok(it) => it,
                Err(_) => {
                    tokio::time::sleep(AFTER_ERROR).await;
                    continue;
                }
            };
            let Some((asker, place)) = self.admit(from.ip()) else {
                continue;
            };
            let question = packet[..length].to_vec();
            let (server, socket) = (self.clone(), socket.clone());
            answers.spawn(async move {
                if let Some(answer) = server.answer(&asker, &question, false).await {
                    let _ = socket.send_to(&answer, from).await;
                }
                drop(place);
            });
        }
    }

    async fn serve_tcp(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let Ok((stream, from)) = listener.accept().await else {
                tokio::time::sleep(AFTER_ERROR).await;
                continue;
            };
            // A connection counts as one question for as long as it lasts.
            if let Some((asker, place)) = self.admit(from.ip()) {
                let server = self.clone();
                connections.spawn(async move {
                    let _ = server.serve_connection(&asker, stream).await;
                    drop(place);
                });
            }
        }
    }

    async fn serve_connection(&self, asker: &Asker, mut stream: TcpStream) -> io::Result<()> {
        for _ in 0..ON_ONE_CONNECTION {
            let question = timeout(IDLE_TIMEOUT, async {
                let length = usize::from(stream.read_u16().await?);
                if length > QUESTION_BYTES {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut question = vec![0; length];
                stream.read_exact(&mut question).await?;
                Ok::<_, io::Error>(question)
            });
            let question = question.await??;
            let Some(answer) = self.answer(asker, &question, true).await else {
                break;
            };
            let length = u16::try_from(answer.len()).map_err(|_| io::ErrorKind::InvalidData)?;
            let mut framed = length.to_be_bytes().to_vec();
            framed.extend_from_slice(&answer);
            timeout(IDLE_TIMEOUT, stream.write_all(&framed)).await??;
        }
        Ok(())
    }

    /// The VM that asks, and a slot for its question; `None` if the VM is unknown or no slot is
    /// free.
    fn admit(self: &Arc<Self>, from: IpAddr) -> Option<(Arc<Asker>, Place)> {
        let asker = self.directory.asker(from)?;
        let mut asked = lock(&self.asked);
        let all: usize = asked.values().sum();
        let own = asked.entry(asker.vm).or_default();
        if all >= QUESTIONS || *own >= QUESTIONS_OF_ONE {
            if *own == 0 {
                asked.remove(&asker.vm);
            }
            return None;
        }
        *own += 1;
        drop(asked);
        let place = Place {
            server: self.clone(),
            vm: asker.vm,
        };
        Some((asker, place))
    }

    /// The answer; `None` if there is none.
    pub async fn answer(&self, asker: &Asker, question: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let question = match message::read(question) {
            Ok(question) => question,
            Err(Rejected::Silence) => return None,
            Err(Rejected::Answer(answer)) => return Some(answer),
        };
        match self.directory.look_up(asker, &question.name) {
            Known::Nothing => {}
            known => {
                let answer = question.own(&known);
                return Some(answer.unwrap_or_else(|| question.error(Rcode::SERVFAIL)));
            }
        }
        if !asker.policy.resolves(&question.name) {
            return Some(question.error(Rcode::NXDOMAIN));
        }
        let Some((resolved, age)) = self.resolve(&question).await else {
            return Some(question.error(Rcode::SERVFAIL));
        };
        if !self.open(asker, &question.name, &resolved, age).await {
            return Some(question.error(Rcode::SERVFAIL));
        }
        let most = if tcp {
            ANSWER_BYTES
        } else {
            question.udp_bytes.into()
        };
        let answer = question.relay(&resolved, age, most);
        Some(answer.unwrap_or_else(|| question.error(Rcode::SERVFAIL)))
    }

    async fn resolve(&self, question: &Question<'_>) -> Option<(Arc<Resolved>, Duration)> {
        let now = Instant::now();
        {
            let cache = lock(&self.cache);
            let kept = cache.get(&question.name, question.kind, now);
            if kept.is_some() {
                return kept;
            }
        }
        let resolved = Arc::new(self.resolvers.ask(question).await?);
        let mut cache = lock(&self.cache);
        let now = Instant::now();
        cache.put(&question.name, question.kind, resolved.clone(), now);
        Some((resolved, Duration::ZERO))
    }

    /// Opens the addresses of a name if a rule allows it, at the rule's ports. `false` if that
    /// failed.
    async fn open(&self, asker: &Asker, name: &str, resolved: &Resolved, age: Duration) -> bool {
        let opened: Vec<_> = resolved
            .addresses
            .iter()
            .filter(|(address, _)| opened_by_name(*address))
            .take(OPENED_MAX)
            .map(|(address, ttl)| (*address, ttl.saturating_sub(age) + GRACE))
            .collect();
        self.opener.open(asker, name, &opened).await
    }
}

/// A slot for a question, freed when it is dropped.
struct Place {
    server: Arc<NameServer>,
    vm: VmId,
}

impl Drop for Place {
    fn drop(&mut self) {
        let asked = &self.server.asked;
        let mut asked = lock(asked);
        if let Some(own) = asked.get_mut(&self.vm) {
            *own -= 1;
            if *own == 0 {
                asked.remove(&self.vm);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::policy::Access;
    use std::net::Ipv4Addr;

    #[test]
    fn queries_are_limited_per_vm_and_in_total() {
        struct Nothing;
        impl Open for Nothing {
            fn open(&self, _: VmId, _: Access, _: &[(IpAddr, Duration)]) -> Result<(), Error> {
                Ok(())
            }
        }
        let directory = Arc::new(Directory::new(Ipv4Addr::new(10, 118, 0, 1), None));
        for number in 2..100 {
            directory.set(Asker {
                vm: VmId::parse(&format!("{number:012x}")).expect("an id"),
                name: format!("vm{number}"),
                network: None,
                policy: Default::default(),
                v4: Ipv4Addr::new(10, 118, 0, number),
                v6: None,
            });
        }
        let resolvers = Resolvers::fixed(vec![([127, 0, 0, 1], 53).into()]);
        let server = Arc::new(NameServer::new(directory, resolvers, Nothing));
        let admit = |number: u8| server.admit(Ipv4Addr::new(10, 118, 0, number).into());
        assert!(admit(1).is_none());
        let own: Vec<_> = (0..QUESTIONS_OF_ONE)
            .map(|_| admit(2).expect("a place"))
            .collect();
        assert!(admit(2).is_none());
        let mut all = own.len();
        let mut others = Vec::new();
        for number in 3..100 {
            others.extend((0..QUESTIONS_OF_ONE).filter_map(|_| admit(number)));
        }
        all += others.len();
        assert_eq!(all, QUESTIONS);
        drop(own);
        assert!(admit(2).is_some());
        drop(others);
        assert!(server.asked.lock().expect("a map").is_empty());
    }
}
