//! Benchmarks of Jiffy and of other VMMs.
//!
//! * [`plan`]: cases and outcomes, as host and probe exchange them.
//! * [`machine`]: runs cases in a machine; starts a new machine if one hangs.
//! * [`probe`]: runs a case inside the machine.
//! * [`cases`]: setup of each case, and its figures.
//! * [`verbs`]: cases that use the `jiffy` command.
//! * [`burst`]: cases of many runs at once on a node with other work.
//! * [`data`]: the node's data folder in the machine.
//! * [`disk`]: cases of disks.
//! * [`folder`]: cases of shared folders.
//! * [`network`]: cases of VMs' network.
//! * [`proxy`]: cases of the node's HTTP proxy.
//! * [`image`]: cases of images from registries.
//! * [`figure`]: medians and percentiles, and goals.
//! * [`charts`]: charts of single runs.
//! * [`check`]: compares figures with the committed file.
//! * [`import`]: cost of an image import on this host.
//! * [`running`]: child processes that are killed with their owner.
//! * [`replay`]: the pager on this host, without a VM.
//! * [`report`], [`plot`]: tables and plots.
//! * [`marker`]: the initramfs whose PID 1 writes the marker.
//! * [`peers`]: other VMMs that are on PATH.
//! * [`host_files`]: programs, libraries and kernel modules of this host, for the machine.
//! * [`traffic`]: what passes between a measuring guest and the host.
//! * [`http`]: HTTP between the two.
//! * [`work`]: what a measuring guest does in a shared folder.
//! * [`link`]: a link's address.

pub mod burst;
pub mod cases;
pub mod charts;
pub mod check;
pub mod data;
pub mod disk;
pub mod figure;
pub mod folder;
pub mod host_files;
pub mod http;
pub mod image;
pub mod import;
pub mod link;
pub mod machine;
pub mod marker;
pub mod network;
pub mod peers;
pub mod plan;
pub mod plot;
pub mod probe;
pub mod proxy;
pub mod replay;
pub mod report;
pub mod running;
pub mod traffic;
pub mod verbs;
pub mod work;
