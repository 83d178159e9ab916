//! Entry points for fuzzing: the parser of logs.

use crate::log;
use std::path::Path;

/// Reads a VM's log that is `bytes`, then appends to it.
///
/// # Panics
///
/// If the appended records can't be read.
pub fn command_log(bytes: &[u8], folder: &Path) {
    std::fs::write(folder.join("command.log"), bytes).expect("the folder can be written");
    let mut reader = log::Reader::new(folder, 0);
    while let Ok(batch) = reader.batch(u64::MAX) {
        if batch.is_empty() {
            break;
        }
    }
    let _ = log::end_of(folder);
    let Ok(mut writer) = log::Writer::open(folder) else {
        return;
    };
    let before = writer.end();
    if writer.append(log::Kind::Note, b"on").is_ok() {
        let mut reader = log::Reader::new(folder, before);
        let batch = reader.batch(writer.end()).expect("what was written");
        assert_eq!(
            batch.last().map(|record| &record.data[..]),
            Some(&b"on"[..])
        );
    }
}
