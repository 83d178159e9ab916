//! Traffic between a running guest and the host.

use crate::link;
use crate::plan::{Sample, TAP, TAP_DESCRIPTOR, TapUse};
use crate::probe::many::idle_ns;
use crate::probe::marks::Marks;
use crate::probe::{cpu_ns, kvm_counters, now_ns, since};
use crate::traffic::{
    BYTES, GUEST, HOST, PACKET, PACKET_PORT, PIECE, PREFIX, ROUND_TRIPS, Request, STREAM_PORT,
    Traffic, WARM_UP_BYTES, WINDOW, WINDOWS, receive, send,
};
use anyhow::{Context, Result, anyhow, ensure};
use jiffy_sys::tap::{Tap, TapOptions};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::Write;
use std::net::{TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Barrier;
use std::time::Duration;

/// Time limit of a read; nothing takes nearly as long, unless a packet was lost.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The host's TAP, made by a case's first run.
pub struct HostTap {
    /// For a VMM that inherits it; without close-on-exec.
    _descriptor: Option<OwnedFd>,
}

impl HostTap {
    fn new(tap: TapUse) -> Result<HostTap> {
        let name = CString::new(TAP)?;
        let made = Tap::create(&TapOptions {
            name: &name,
            queues: 1,
            owner: None,
            offloads: false,
            persistent: tap == TapUse::Named,
        })?;
        link::set_up(made.index, HOST, PREFIX)?;
        let [queue] = <[OwnedFd; 1]>::try_from(made.queues)
            .map_err(|queues| anyhow!("a TAP with {} queues", queues.len()))?;
        let descriptor = match tap {
            // Only one process may have it open.
            TapUse::Named => None,
            TapUse::Inherited => {
                // The first free number from this one on.
                let number = fcntl_dupfd_cloexec(&queue, TAP_DESCRIPTOR)?;
                fcntl_setfd(&number, FdFlags::empty())?;
                ensure!(
                    number.as_raw_fd() == TAP_DESCRIPTOR,
                    "descriptor {TAP_DESCRIPTOR} is in use"
                );
                Some(number)
            }
        };
        Ok(HostTap {
            _descriptor: descriptor,
        })
    }
}

/// Boots a guest, and measures once it listens. The sample's time is that in which the machine's
/// processor was busy, for each unit of the traffic.
///
/// # Errors
///
/// If the TAP can't be made, the VMM ends before its guest listens, or the traffic stops.
pub fn measure(
    argv: &[String],
    tap: TapUse,
    traffic: Traffic,
    host: &mut Option<HostTap>,
) -> Result<Sample> {
    if host.is_none() {
        *host = Some(HostTap::new(tap)?);
    }
    let (mut child, mut marks) = Marks::start(argv)?;
    marks.next(&mut child)?;
    drop(marks);
    let mut clock = Clock {
        pid: child.0.id(),
        measured: None,
    };
    match traffic {
        Traffic::Sent(streams) => pass(streams, Request::Send, &mut clock)?,
        Traffic::Received(streams) => pass(streams, Request::Receive, &mut clock)?,
        Traffic::Packets => packets(&mut clock)?,
        Traffic::RoundTrips => round_trips(&mut clock)?,
    }
    let measured = clock.measured.context("nothing was measured")?;
    Ok(Sample {
        nanoseconds: measured.busy_ns / traffic.units(),
        counters: measured.counters,
        ..Sample::default()
    })
}

/// Measures one piece of work, once connections are made and warm.
struct Clock {
    pid: u32,
    measured: Option<Measured>,
}

struct Measured {
    busy_ns: u64,
    counters: BTreeMap<String, u64>,
}

impl Clock {
    fn time(&mut self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (counters, cpu) = (kvm_counters(self.pid), cpu_ns(self.pid)?);
        let idle = idle_ns()?;
        let start = now_ns();
        work()?;
        let end = now_ns();
        let idle = idle_ns()? - idle;
        let mut counters = since(kvm_counters(self.pid), &counters);
        counters.insert("cpu_ns".into(), cpu_ns(self.pid)? - cpu);
        counters.insert("idle_ns".into(), idle);
        self.measured = Some(Measured {
            busy_ns: (end - start).saturating_sub(idle),
            counters,
        });
        Ok(())
    }
}

fn connect() -> Result<TcpStream> {
    let stream = TcpStream::connect((GUEST, STREAM_PORT)).context("the guest's server")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

fn ask(stream: &mut TcpStream, request: Request) -> Result<()> {
    Ok(stream.write_all(&request.encode())?)
}

/// Makes one request and does the client's part of it.
fn exchange(stream: &mut TcpStream, request: Request, piece: &mut [u8]) -> Result<()> {
    ask(stream, request)?;
    match request {
        Request::Send(count) => receive(stream, count, piece),
        Request::Receive(count) => {
            send(stream, count, piece)?;
            receive(stream, 1, piece)
        }
        Request::Echo(count) => (0..count).try_for_each(|_| {
            send(stream, 1, piece)?;
            receive(stream, 1, piece)
        }),
    }
}

/// Passes all bytes in streams at once, each by a thread of its own.
fn pass(streams: u32, request: fn(u64) -> Request, clock: &mut Clock) -> Result<()> {
    let barrier = Barrier::new(streams as usize + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..streams)
            .map(|_| {
                scope.spawn(|| {
                    let mut piece = vec![1; PIECE];
                    let warm = connect().and_then(|mut stream| {
                        exchange(&mut stream, request(WARM_UP_BYTES), &mut piece)?;
                        Ok(stream)
                    });
                    barrier.wait();
                    barrier.wait();
                    let bytes = BYTES / u64::from(streams);
                    exchange(&mut warm?, request(bytes), &mut piece)
                })
            })
            .collect();
        barrier.wait();
        clock.time(|| {
            barrier.wait();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
        })
    })
}

fn packets(clock: &mut Clock) -> Result<()> {
    let socket = UdpSocket::bind((HOST, 0))?;
    socket.connect((GUEST, PACKET_PORT))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let mut packet = [1; PACKET];
    let mut windows = |count: usize| -> Result<()> {
        for _ in 0..count {
            for _ in 0..WINDOW {
                socket.send(&packet)?;
            }
            for _ in 0..WINDOW {
                let length = socket.recv(&mut packet).context("a packet was lost")?;
                ensure!(length == PACKET, "a packet of {length} bytes");
            }
        }
        Ok(())
    };
    windows(2)?;
    clock.time(|| windows(WINDOWS))
}

fn round_trips(clock: &mut Clock) -> Result<()> {
    let mut stream = connect()?;
    let mut piece = [1];
    exchange(&mut stream, Request::Echo(10), &mut piece)?;
    clock.time(|| exchange(&mut stream, Request::Echo(ROUND_TRIPS), &mut piece))
}
