//! jiffyd: images, the registry of VMs, and the API.
//!
//! * [`options`], `folders`: how it was started and where its files are.
//! * [`listen`], `places`: sockets, the lock, and who may connect.
//! * [`api`]: HTTP in, calls out.
//! * [`node`]: what requests come down to.
//! * [`spec`]: checks what a VM is to be.
//! * [`golden`]: VMs to go on from, made by the node itself.
//! * [`cpu`]: what of this host's processor guests can have.
//!
//! What it keeps on disk is in `jiffy-content`, and each VM in `jiffy-vmhost`.

mod api;
mod cpu;
mod folders;
mod golden;
mod listen;
mod node;
pub mod options;
mod places;
mod spec;
#[cfg(feature = "testing")]
pub mod testing;

use listen::Listeners;
use options::Options;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

/// Runs the daemon until a signal or a request ends it. VMs go on.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let paths = options.paths()?;
    paths.prepare()?;
    let _lock = listen::lock(&paths)?;
    let listeners = Listeners::open(&options, &paths).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let node = node::Node::open(paths.clone(), &options).await?;
    info!(
        socket = %paths.socket.display(),
        tcp = ?listeners.tcp_address(),
        data = %paths.data.display(),
        "jiffyd listens"
    );
    if let Some(descriptor) = options.ready_fd {
        listen::announce(descriptor);
    }
    let inode = listeners.inode();
    let end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    listen::serve(listeners, std::sync::Arc::clone(&node), end).await;
    listen::remove_socket(&paths.socket, inode);
    node.flush().await;
    info!("jiffyd ends; VMs go on");
    Ok(())
}
