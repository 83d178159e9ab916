//! Output for the user.

pub use jiffy_wire::text::list::command;
pub use jiffy_wire::text::table::Table;
pub use jiffy_wire::text::{age, harmless, harmless_json, size};

/// The current Unix time, seconds.
pub fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
