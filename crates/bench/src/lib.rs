//! Benchmarks of Jiffy and of other VMMs.
//!
//! * [`plan`]: what to run, as the host tells the probe in the machine.
//! * [`machine`]: runs it there; starts a new machine if one hangs.
//! * [`probe`]: runs it there and takes the time to a marker the guest writes.
//! * [`cases`]: how each case is set up and read back.
//! * [`verbs`]: cases that use the `jiffy` command.
//! * [`disk`]: cases of disks.
//! * [`image`]: cases of images from registries.
//! * [`figure`]: medians and percentiles, the goals.
//! * [`check`]: compares figures with the committed file.
//! * [`import`]: an image imported, on this host.
//! * [`running`]: child processes that are killed with their owner.
//! * [`replay`]: the pager on this host, without a VM.
//! * [`report`], [`plot`]: tables and plots.
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
