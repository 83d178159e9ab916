//! jiffyd: images, the registry of VMs, and the API.
//!
//! * [`options`], [`paths`]: how it was started and where its files are.
//! * [`listen`]: sockets and the lock.
//! * [`api`]: HTTP in, calls out.
//! * [`node`]: what requests come down to.
//! * [`spec`]: checks what a VM is to be.
//! * [`registry`]: which VMs there are.
//! * [`room`]: the memory that they have, and who waits for some.
//! * [`roots`]: disks of VMs' own for what they change in their roots.
//! * [`vm`]: one VM, owned by one task.
//! * [`images`], [`kernels`], [`volumes`]: what VMs are made of.
//! * [`snapshots`], [`golden`]: VMs to go on from.
//! * [`pager`]: who serves their memory.
//! * [`digests`], [`cpu`]: what must be the same for that.
//! * [`agent`], [`proxy`], [`frames`]: talking to guests.
//! * [`follow`]: logs for clients.
//! * [`durable`], [`names`], [`clock`], [`error`]: small things many need.

mod agent;
mod api;
mod clock;
mod cpu;
mod digests;
mod durable;
mod error;
mod follow;
mod frames;
mod golden;
mod images;
mod kernels;
mod listen;
mod names;
mod node;
pub mod options;
mod pager;
mod paths;
mod proxy;
mod records;
mod registry;
mod room;
mod roots;
mod snapshots;
mod spec;
#[cfg(feature = "testing")]
pub mod testing;
mod vm;
mod volumes;

use listen::Listeners;
use options::Options;
use paths::Paths;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

/// Runs the daemon until a signal or a request ends it. VMs go on.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let paths = Paths::resolve(&options)?;
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
