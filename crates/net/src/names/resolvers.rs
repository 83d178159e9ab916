//! The host's resolvers.

use super::message::{self, ANSWER_BYTES, Question, Resolved, UDP_BYTES};
use jiffy_sys::mutex::lock;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

const PORT: u16 = 53;
/// Most resolvers that are used, as in resolv.conf(5).
const RESOLVERS: usize = 3;
/// How long to wait for one resolver, and how many times all are tried in turn.
const RESOLVER_TIMEOUT: Duration = Duration::from_millis(1500);
const ROUNDS: usize = 2;
/// How often the file is checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The host's resolvers, as listed in resolv.conf(5). The file is read again after a change.
#[derive(Debug)]
pub struct Resolvers {
    file: PathBuf,
    /// Our own addresses, which are never queried, to avoid a loop.
    not: Vec<IpAddr>,
    known: Mutex<Known>,
    /// Fixed resolvers, used instead of the file.
    fixed: Vec<SocketAddr>,
}

#[derive(Debug, Default)]
struct Known {
    looked: Option<Instant>,
    changed: Option<SystemTime>,
    all: Vec<SocketAddr>,
}

impl Resolvers {
    /// The resolvers that `file` lists, without the addresses in `not`.
    pub fn new(file: PathBuf, not: Vec<IpAddr>) -> Resolvers {
        Resolvers {
            file,
            not,
            known: Mutex::default(),
            fixed: Vec::new(),
        }
    }

    /// Only these resolvers.
    pub fn fixed(all: Vec<SocketAddr>) -> Resolvers {
        Resolvers {
            fixed: all,
            ..Resolvers::new(PathBuf::new(), Vec::new())
        }
    }

    fn all(&self) -> Vec<SocketAddr> {
        if !self.fixed.is_empty() {
            return self.fixed.clone();
        }
        let mut known = lock(&self.known);
        if known.looked.is_none_or(|it| it.elapsed() >= CHECK_INTERVAL) {
            known.looked = Some(Instant::now());
            let changed = std::fs::metadata(&self.file)
                .and_then(|it| it.modified())
                .ok();
            if changed.is_none() || changed != known.changed {
                known.changed = changed;
                let text = std::fs::read(&self.file).unwrap_or_default();
                let named = named(&String::from_utf8_lossy(&text));
                known.all = named
                    .into_iter()
                    .filter(|it| !self.not.contains(&it.ip()))
                    .collect();
            }
        }
        known.all.clone()
    }

    /// Asks the resolvers in turn. `None` if none of them answers.
    pub async fn ask(&self, question: &Question<'_>) -> Option<Resolved> {
        let all = self.all();
        let mut failed = None;
        for _ in 0..ROUNDS {
            for resolver in &all {
                let answer = timeout(RESOLVER_TIMEOUT, by_udp(*resolver, question)).await;
                let Ok(Ok(mut answer)) = answer else {
                    continue;
                };
                if answer.cut {
                    match timeout(RESOLVER_TIMEOUT, by_tcp(*resolver, question)).await {
                        Ok(Ok(whole)) => answer = whole,
                        _ => continue,
                    }
                }
                if !answer.failed {
                    return Some(answer);
                }
                failed = Some(answer);
            }
            if failed.is_some() {
                break;
            }
        }
        failed
    }
}

/// The resolvers that the text of a resolv.conf(5) names; if there are none, this host itself.
pub fn named(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let named = words.next()? == "nameserver";
        // Addresses with a zone (fe80::1%eth0) are not supported.
        let address: IpAddr = words.next()?.parse().ok()?;
        named.then(|| SocketAddr::new(address, PORT))
    };
    let all: Vec<_> = text.lines().filter_map(address).take(RESOLVERS).collect();
    if all.is_empty() {
        return vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT)];
    }
    all
}

/// Uses a new port and a random id, so that an answer can't be forged without seeing the question.
async fn by_udp(resolver: SocketAddr, question: &Question<'_>) -> io::Result<Resolved> {
    let any = match resolver {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    let id = number()?;
    let asked = question.forward(id).ok_or(io::ErrorKind::InvalidInput)?;
    socket.send(&asked).await?;
    let mut answer = [0; UDP_BYTES as usize];
    loop {
        let length = socket.recv(&mut answer).await?;
        if let Some(resolved) = message::read_answer(question, id, &answer[..length]) {
            return Ok(resolved);
        }
    }
}

async fn by_tcp(resolver: SocketAddr, question: &Question<'_>) -> io::Result<Resolved> {
    let mut stream = TcpStream::connect(resolver).await?;
    let id = number()?;
    let asked = question.forward(id).ok_or(io::ErrorKind::InvalidInput)?;
    let length = u16::try_from(asked.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(&asked);
    stream.write_all(&framed).await?;
    let length = usize::from(stream.read_u16().await?).min(ANSWER_BYTES);
    let mut answer = Vec::new();
    stream.take(length as u64).read_to_end(&mut answer).await?;
    let resolved = message::read_answer(question, id, &answer);
    resolved.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn number() -> io::Result<u16> {
    let mut bytes = [0; 2];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u16::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read_from_resolv_conf() {
        let text = "# comment\nsearch x\nnameserver 10.0.0.1 \n nameserver fd00::1\nnameserver\n\
                    nameserver fe80::1%eth0\nnameserver x\noptions edns0\nnameservers 1.2.3.4\n";
        let all: Vec<_> = named(text).iter().map(ToString::to_string).collect();
        assert_eq!(all, ["10.0.0.1:53", "[fd00::1]:53"]);
        assert_eq!(named("").len(), 1);
        assert_eq!(named(&"nameserver 10.0.0.1\n".repeat(9)).len(), RESOLVERS);
    }
}
