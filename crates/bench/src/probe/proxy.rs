//! Measures requests by the node's HTTP proxy.

use super::many::{Watch, idle_ns, pid_of, vm_of};
use super::network::import_image;
use super::node::{JIFFY, jiffy, output};
use super::{kvm_counters, now_ns, timeline_spans, wait_until_idle};
use crate::http::{ARGUMENT, Client, PORT};
use crate::network::IMAGE;
use crate::plan::{ProxyUse, Sample};
use crate::proxy::ADDRESS;
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use std::time::Duration;

/// Time limit of a VM's start.
const START_TIME: Duration = Duration::from_secs(30);
/// Requests of a measurement, and those before it. With each packet the emulator may hang
/// (docs/laboratory.md).
const REQUESTS: u64 = 100;
const WARM_UP: u64 = 10;

/// Starts a VM with a server, and measures requests to it.
///
/// # Errors
///
/// If the VM can't be started, or the proxy or its server does not answer.
pub fn run(what: ProxyUse, run: u32) -> Result<Sample> {
    if run == 0 {
        import_image()?;
    }
    let vm = format!("proxied-{what:?}-{run}").to_lowercase();
    let found = start(&vm).and_then(|()| match what {
        ProxyUse::Wake => first_byte(&vm),
        ProxyUse::Overhead => overhead(&vm),
    });
    let _ = output(&["rm", "--force", &vm]);
    found
}

/// The host that names the server in a request.
fn host(vm: &str) -> String {
    format!("{PORT}-{vm}.localhost")
}

/// Boots the VM; returns when its server has answered.
fn start(vm: &str) -> Result<()> {
    let mut words = vec!["run", "--detach", "--cold", "--name", vm];
    words.extend(["--network", "default", "--memory", "128"]);
    words.extend([IMAGE, "--", "/bin/answer", ARGUMENT]);
    jiffy(&words)?;
    let until = now_ns() + START_TIME.as_nanos() as u64;
    let ask = || Client::connect(ADDRESS, &host(vm))?.get();
    while let Err(error) = ask() {
        ensure!(now_ns() < until, "the server does not answer: {error:#}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Measures from a connection to the proxy to the answer of a VM that sleeps.
fn first_byte(vm: &str) -> Result<Sample> {
    jiffy(&["hibernate", vm])?;
    wait_until_idle()?;
    let host = host(vm);
    let idle = idle_ns()?;
    let start = now_ns();
    let first = Client::connect(ADDRESS, &host)?.get()?;
    let idle = idle_ns()? - idle;
    let mut counters = kvm_counters(pid_of(vm)?);
    counters.insert("idle_ns".into(), idle);
    let timeline = [JIFFY, "timeline", vm, "--format", "json"].map(String::from);
    Ok(Sample {
        nanoseconds: first - start,
        counters,
        spans: timeline_spans(&timeline)?,
    })
}

/// Measures what a request by the proxy takes in addition to one to the VM's address. In both cases
/// the client keeps its connection.
fn overhead(vm: &str) -> Result<Sample> {
    let network = vm_of(vm)?.network.context("the VM has no network")?;
    let address = network.addresses.first().context("it has no address")?;
    let direct = SocketAddr::new(address.parse().context("its address")?, PORT);
    let host = host(vm);
    wait_until_idle()?;
    let mut client = Client::connect(direct, &host)?;
    let kept = on_average(|| client.get())?;
    // The server has one client at a time.
    drop(client);
    let anew = on_average(|| Client::connect(direct, &host)?.get())?;
    let mut client = Client::connect(ADDRESS, &host)?;
    let proxied = on_average(|| client.get())?;
    let overhead = proxied.checked_sub(kept);
    let spans = [
        ("a request by the proxy", proxied),
        ("to the VM", kept),
        ("to the VM by a connection of its own", anew),
    ];
    Ok(Sample {
        nanoseconds: overhead.context("requests by the proxy take less than without it")?,
        spans: spans.map(|(name, ns)| (name.to_owned(), ns)).into(),
        ..Sample::default()
    })
}

/// Instructions of the machine for a request, on average.
fn on_average(mut request: impl FnMut() -> Result<u64>) -> Result<u64> {
    for _ in 0..WARM_UP {
        request()?;
    }
    let watch = Watch::begin(&[])?;
    for _ in 0..REQUESTS {
        request()?;
    }
    Ok(watch.end()?.busy_ns / REQUESTS)
}
