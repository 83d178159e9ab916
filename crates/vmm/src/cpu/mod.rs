//! What a guest's processor is.
//!
//! * [`cpuid`]: what CPUID shows each vCPU.
//! * [`msrs`]: the MSRs that a snapshot keeps, and their order; [`mtrr`]: memory
//!   types as firmware leaves them.
//! * [`tsc`]: restoring the time stamp counter.
//! * [`profile`]: the features of a processor, which a snapshot is compared with.
//! * [`quirks`]: what differs where QEMU's TCG is the processor.

pub mod cpuid;
pub mod msrs;
pub mod mtrr;
pub mod profile;
pub mod quirks;
pub mod tsc;
