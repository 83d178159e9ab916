//! A guest's processor.
//!
//! * [`cpuid`]: CPUID of each vCPU.
//! * [`msrs`]: the MSRs that a snapshot keeps, and their order; [`mtrr`]: memory
//!   types as firmware leaves them.
//! * [`tsc`]: restores the time stamp counter.
//! * [`profile`]: the features of a processor, with which a snapshot is compared.
//! * [`quirks`]: workarounds for QEMU's TCG.

pub mod cpuid;
pub mod msrs;
pub mod mtrr;
pub mod profile;
pub mod quirks;
pub mod tsc;
