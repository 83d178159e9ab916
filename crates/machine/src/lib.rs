//! The QEMU machine in which VMs run where the host has no real KVM.
//!
//! * [`machine`]: the user's machine: start, stop, status, remove.
//! * [`options`]: its size and shared folders, stored between starts.
//! * [`shares`]: folders of the host that it shares; [`servers`]: starts their servers.
//! * [`error`]: errors, with hints.
//! * [`instance`]: one running QEMU, the user's or a test's.
//! * [`qemu`]: QEMU's command line; [`qmp`]: its control socket.
//! * [`forward`]: ports of the host that are forwarded to it.
//! * [`listeners`]: the sockets on which QEMU listens for it.
//! * [`disk`]: the data disk.
//! * [`client`]: runs programs in the machine; [`shell`]: with a terminal.
//! * [`protocol`]: messages of host and agent; [`agent`]: the machine's side.
//! * [`image`]: builds the kernel and initramfs it boots.

pub mod agent;
pub mod client;
pub mod disk;
pub mod error;
pub mod forward;
pub mod image;
pub mod instance;
pub mod listeners;
pub mod machine;
pub mod options;
pub mod protocol;
pub mod qemu;
pub mod qmp;
pub mod servers;
pub mod shares;
pub mod shell;

pub use error::MachineError;
pub use forward::{Forward, PortsLock};
pub use machine::{Endpoint, Machine, Paths, Stage, State, Status};
pub use options::{Accelerator, Options};
pub use shares::Share;
