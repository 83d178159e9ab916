//! What a measuring guest does in a shared folder, and how it and the host agree on it.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The tag by which guests mount the folder.
pub const TAG: &str = "bench";
/// Kernel parameter with the [`Work`]; it arrives in the environment of PID 1.
pub const PARAMETER: &str = "folder_work";

/// Name of the folder's part for what is measured.
pub const MEASURED: Part = Part {
    name: "measured",
    bytes: 16 << 20,
    files: 1000,
};
/// The part for the warm-up: less of the same work.
pub const WARM_UP: Part = Part {
    name: "warm-up",
    bytes: 1 << 20,
    files: 10,
};
/// Bytes of a read or write.
pub const PIECE: usize = 1 << 20;
/// Name of the file with a part's bytes.
pub const DATA: &str = "data";
/// Name of the folder with a part's files.
pub const FILES: &str = "files";

/// A part of the folder: an amount of work.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// Bytes of the file that is read or written.
    pub bytes: u64,
    /// Number of empty files for all other work.
    pub files: u32,
}

/// What a guest does in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Writes a new file.
    Write,
    /// Reads a file that it has not read before.
    Read,
    /// Creates and closes files.
    Create,
    /// Asks for the attributes of files that it has not seen before.
    Stat,
    /// Lists a folder.
    List,
    /// Removes files that it has not seen before.
    Remove,
}

impl Work {
    /// All kinds.
    pub const ALL: [Work; 6] = [
        Work::Write,
        Work::Read,
        Work::Create,
        Work::Stat,
        Work::List,
        Work::Remove,
    ];

    /// The case that measures it.
    pub fn case(self) -> &'static str {
        match self {
            Work::Write => "folder/write/instructions-per-mib",
            Work::Read => "folder/read/instructions-per-mib",
            Work::Create => "folder/create/instructions-per-file",
            Work::Stat => "folder/stat/instructions-per-file",
            Work::List => "folder/list/instructions-per-file",
            Work::Remove => "folder/remove/instructions-per-file",
        }
    }

    /// Its name in the kernel parameter.
    pub fn word(self) -> &'static str {
        match self {
            Work::Write => "write",
            Work::Read => "read",
            Work::Create => "create",
            Work::Stat => "stat",
            Work::List => "list",
            Work::Remove => "remove",
        }
    }

    /// The number of units by which a run's instructions are divided.
    pub fn units(self) -> u64 {
        match self {
            Work::Write | Work::Read => MEASURED.bytes >> 20,
            _ => MEASURED.files.into(),
        }
    }
}

impl FromStr for Work {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Work> {
        let mut all = Work::ALL.into_iter();
        match all.find(|work| work.word() == text) {
            Some(work) => Ok(work),
            None => bail!("{text} is no work in a folder"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_work_has_a_case_and_a_word_of_its_own() {
        let cases: std::collections::BTreeSet<_> = Work::ALL.map(Work::case).into();
        assert_eq!(cases.len(), Work::ALL.len());
        for work in Work::ALL {
            assert_eq!(work.word().parse::<Work>().unwrap(), work);
        }
        assert!("rest".parse::<Work>().is_err());
    }
}
