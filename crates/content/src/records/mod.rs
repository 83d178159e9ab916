//! The files that the node keeps on disk, in types of their own.
//!
//! The types of the program and of the API change with every release; a file's format changes
//! only with its version. So each file has types here that are used for nothing else, with
//! conversions to and from the program's types. The conversions name every field: a field that is
//! added to either side does not compile until it is decided whether it is saved.
//!
//! * A field may be added within a version if it has a default and an older
//!   release may ignore it. Fields that are not known are ignored.
//! * Anything else is another version: the types as they were stay here under
//!   the number of their version, and are read by this release and the next.
//! * A file in `golden/` beside the sources has each version's bytes, and the
//!   tests hold the types against it (`docs/upgrades.md`).
//!
//! | module | files |
//! |---|---|
//! | [`vm`] | `vms/ID/vm.json` |
//! | [`snapshot`] | `snapshot.json` of captured VMs |
//! | [`image`] | `images/NAME/image.json` |
//! | [`networks`] | `networks.json` |
//! | [`origins`] | `chunks/ID.origins.json`, `origins.json` beside `ram.image` |
//! | [`boot_set`] | `images/NAME/boot.json` |
//! | [`prefault`] | `prefault.json` of golden snapshots |
//! | [`timeline`] | `vms/ID/timeline.json` |
//! | [`artifact`] | configurations of artifacts in registries |
//! | [`spec`] | what VMs are made of, a part of several of them |

pub mod artifact;
pub mod boot_set;
pub mod image;
pub mod networks;
pub mod origins;
pub mod prefault;
pub mod snapshot;
pub mod spec;
#[cfg(test)]
mod tests;
pub mod timeline;
pub mod vm;

use std::collections::BTreeMap;

/// Converts a saved type into the program's, and back, field by field, each in
/// the way that is named: [`same`], [`into`], [`opt`], [`list`] or [`map`]. A saved type may hold
/// the fields of one of the program's types that is a field of another: that is `around` it.
macro_rules! both_ways {
    ($saved:path, $live:path { $($beside:ident),* }
     around $inner:ident: $whole:path { $($field:ident: $how:ident),* $(,)? }) => {
        impl From<$live> for $saved {
            fn from(live: $live) -> Self {
                type Whole = $whole;
                let $live { $inner: Whole { $($field),* }, $($beside),* } = live;
                $saved { $($field: crate::records::$how($field),)* $($beside),* }
            }
        }
        impl From<$saved> for $live {
            fn from(saved: $saved) -> Self {
                let $saved { $($field,)* $($beside),* } = saved;
                type Whole = $whole;
                let $inner = Whole { $($field: crate::records::$how($field)),* };
                $live { $inner, $($beside),* }
            }
        }
    };
    ($saved:path, $live:path { $($field:ident: $how:ident),* $(,)? }) => {
        impl From<$live> for $saved {
            fn from(live: $live) -> Self {
                let $live { $($field),* } = live;
                $saved { $($field: crate::records::$how($field)),* }
            }
        }
        impl From<$saved> for $live {
            fn from(saved: $saved) -> Self {
                let $saved { $($field),* } = saved;
                $live { $($field: crate::records::$how($field)),* }
            }
        }
    };
}
pub(crate) use both_ways;

/// As `both_ways`, for an enum whose variants have no fields.
macro_rules! both_ways_enum {
    ($saved:ident, $live:path { $($variant:ident),* $(,)? }) => {
        impl From<$live> for $saved {
            fn from(live: $live) -> Self {
                type Live = $live;
                match live { $(Live::$variant => $saved::$variant),* }
            }
        }
        impl From<$saved> for $live {
            fn from(saved: $saved) -> Self {
                type Live = $live;
                match saved { $($saved::$variant => Live::$variant),* }
            }
        }
    };
}
pub(crate) use both_ways_enum;

/// A field that is saved as it is.
fn same<T>(field: T) -> T {
    field
}

/// A field with a saved type of its own.
fn into<A: Into<B>, B>(field: A) -> B {
    field.into()
}

/// An optional field with a saved type of its own.
fn opt<A: Into<B>, B>(field: Option<A>) -> Option<B> {
    field.map(Into::into)
}

/// A list of values with a saved type of their own.
fn list<A: Into<B>, B>(field: Vec<A>) -> Vec<B> {
    field.into_iter().map(Into::into).collect()
}

/// Values by name, with a saved type of their own.
fn map<A: Into<B>, B>(field: BTreeMap<String, A>) -> BTreeMap<String, B> {
    field
        .into_iter()
        .map(|(name, value)| (name, value.into()))
        .collect()
}

/// For fields that are left out when they are false.
fn is_false(flag: &bool) -> bool {
    !*flag
}
