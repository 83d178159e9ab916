//! The daemon: options, composition, signals, logging, exit status.

mod folders;
mod lock;
mod options;

use anyhow::Context;
use clap::Parser;
use jiffy_api::serve::{self, Listeners};
use jiffy_content::error::Error;
use jiffy_node::Node;
use jiffy_proxy::serve::Proxy;
use jiffy_proxy::tls::Tls;
use jiffy_vmhost::network::uninstall;
use options::Options;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// Threads of the async runtime: requests are small, and VMs' tasks mostly sleep.
const WORKERS: usize = 2;
/// Desired limit of descriptors: a running VM takes six, and more while it starts.
const DESCRIPTORS: u64 = 1 << 16;

fn main() -> ExitCode {
    jiffy_sys::environment::unset_empty();
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    jiffy_sys::descriptors::raise_limit(DESCRIPTORS);
    // Blocking work runs on many threads, of which few allocate at the same time.
    jiffy_sys::arenas::share_one();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(run(options));
        // Does not wait for an import in progress.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffyd: {error:#}");
            let known = error.downcast_ref::<Error>();
            if let Some(hint) = known.and_then(|error| error.0.hint.as_ref()) {
                eprintln!("jiffyd: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs the daemon until a signal or a request ends it. VMs keep running.
async fn run(options: Options) -> anyhow::Result<()> {
    let paths = options.paths()?;
    paths.prepare()?;
    let _lock = lock::lock(&paths)?;
    if options.remove_network {
        let settings = options.node(None)?.network;
        return uninstall(&settings, &paths)
            .map_err(|why| anyhow::anyhow!("The network of VMs can't be removed: {why}."));
    }
    let proxy = options.proxy()?;
    let tls = proxy.as_ref().and_then(|settings| settings.tls.clone());
    tokio::spawn(reload_on(signal(SignalKind::hangup())?, tls));
    let listeners = Listeners::open(&paths.socket, options.tcp()?, options.connections).await?;
    let proxy = match proxy {
        None => None,
        Some(settings) => {
            let address = settings.address;
            let bound = Proxy::bind(settings).await;
            Some(bound.with_context(|| format!("The proxy can't listen on {address}"))?)
        }
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let config = options.node(listeners.tcp_address())?;
    let node = Node::open(paths.clone(), config).await;
    let proxy = proxy.map(|proxy| tokio::spawn(proxy.serve(Arc::clone(&node))));
    info!(
        socket = %paths.socket.display(),
        tcp = ?listeners.tcp_address(),
        data = %paths.data.display(),
        "jiffyd listens"
    );
    if let Some(descriptor) = options.ready_fd {
        announce(descriptor);
    }
    let end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    serve::serve(listeners, Arc::clone(&node), &paths.requests(), end).await;
    if let Some(proxy) = proxy {
        proxy.abort();
    }
    node.flush().await;
    info!("jiffyd ends; VMs keep running");
    Ok(())
}

/// Reloads the proxy's certificate, if it has one, at each of these signals. None of them ends the
/// daemon: it is the usual signal to read files again.
async fn reload_on(mut hangup: Signal, tls: Option<Arc<Tls>>) {
    while hangup.recv().await.is_some() {
        match tls.as_ref().map(|tls| tls.reload()) {
            None => info!("SIGHUP is ignored: the proxy has no certificate to reload"),
            Some(Ok(())) => info!("the proxy's certificate was reloaded"),
            Some(Err(error)) => warn!(%error, "the proxy keeps its previous certificate"),
        }
    }
}

/// Tells the parent process that the daemon listens. The descriptor is opened through /proc,
/// because its number in an option does not make this process its owner.
pub fn announce(descriptor: u32) {
    use std::io::Write;
    let path = format!("/proc/self/fd/{descriptor}");
    let told = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(b"1"));
    if let Err(error) = told {
        warn!(%path, %error, "readiness can't be reported to the descriptor of --ready-fd");
    }
}
