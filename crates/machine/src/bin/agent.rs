//! `jiffy-machine-agent`: runs inside the machine. See [`jiffy_machine::agent`].

use anyhow::Context;
use clap::Parser;
use jiffy_machine::agent::{self, heartbeat, ready, serve, shares};
use jiffy_machine::protocol::{AGENT_PORT, GUEST, Ready, TOKEN_PATH};
use jiffy_machine::shares::Share;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

/// Reports when the machine is ready, and runs programs in it for the host
#[derive(Debug, Parser)]
struct Options {
    /// File with the token that connections must present
    #[arg(long, default_value = TOKEN_PATH)]
    token_file: PathBuf,
    /// Report readiness only once this address accepts connections
    #[arg(long)]
    wait_for: Option<SocketAddr>,
    /// Report readiness only if this is a mount point
    #[arg(long)]
    mount: Option<PathBuf>,
    /// Interrupt each CPU once a second, because the emulator loses interrupts
    #[arg(long)]
    heartbeat: bool,
    /// Mount a folder that the host shares: rw:PATH or ro:PATH; in the order of their ports
    #[arg(long)]
    share: Vec<Share>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    agent::allow_huge_pages();
    let token = std::fs::read_to_string(&options.token_file)
        .with_context(|| format!("reading the token from {}", options.token_file.display()))?;
    let listener = TcpListener::bind((GUEST, AGENT_PORT))
        .and_then(|listener| jiffy_sys::backlog::enlarge(&listener).map(|()| listener))
        .with_context(|| format!("listening on {GUEST}:{AGENT_PORT}"))?;
    if options.heartbeat {
        std::thread::spawn(|| {
            if let Err(error) = heartbeat::run() {
                eprintln!(
                    "jiffy-machine-agent: the heartbeat of the hardware clock failed: {error}"
                );
            }
        });
    }
    std::thread::spawn(move || {
        if let Err(error) = report(&options) {
            eprintln!("jiffy-machine-agent: {error:#}");
        }
    });
    serve::serve(&listener, token.trim_end());
    Ok(())
}

fn report(options: &Options) -> anyhow::Result<()> {
    // Before the port, which nobody on the host reads when an agent is started again.
    let mounted = mount_shares(&options.share);
    if let Err(message) = &mounted {
        eprintln!("jiffy-machine-agent: {message}");
    }
    let mut port = ready::Port::open()?;
    port.push(&Ready::Agent {
        kvm: std::path::Path::new("/dev/kvm").exists(),
        uptime_ms: ready::uptime_ms(),
    })?;
    let ready = || ready::wait_for(options.wait_for, options.mount.as_deref());
    let message = match mounted.and_then(|()| ready()) {
        Ok(()) => Ready::Services {
            uptime_ms: ready::uptime_ms(),
        },
        Err(message) => Ready::Failed { message },
    };
    port.push(&message)?;
    Ok(())
}

fn mount_shares(all: &[Share]) -> Result<(), String> {
    let places: Vec<_> = all.iter().map(Share::mount_point).collect();
    shares::unmount_left(&places);
    for (number, share) in shares::in_order(all) {
        shares::mount(number, share, |message| {
            eprintln!("jiffy-machine-agent: {message}");
        })?;
    }
    Ok(())
}
