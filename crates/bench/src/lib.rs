//! Measures Jiffy beside its peers.
//!
//! * [`plan`]: what to run, as the host tells the probe in the machine.
//! * [`machine`]: has it run there, in another one should one get stuck.
//! * [`probe`]: runs it there and takes the time to a marker the guest writes.
//! * [`cases`]: how each case is set up and read back.
//! * [`verbs`]: those of the verbs that a user types.
//! * [`disk`]: those about disks.
//! * [`image`]: those about images of registries.
//! * [`figure`]: medians and percentiles, the goals.
//! * [`check`]: beside the committed file: what got worse.
//! * [`import`]: an image imported, on this host.
//! * [`running`]: programs that end with who started them.
//! * [`replay`]: the pager on this host, without a VM.
//! * [`report`], [`plot`]: what people read.
//! * [`marker`]: the initramfs whose PID 1 writes the marker.
//! * [`peers`]: other monitors found on PATH, made to run in the machine.

pub mod cases;
pub mod check;
pub mod disk;
pub mod figure;
pub mod image;
pub mod import;
pub mod machine;
pub mod marker;
pub mod peers;
pub mod plan;
pub mod plot;
pub mod probe;
pub mod replay;
pub mod report;
pub mod running;
pub mod verbs;
