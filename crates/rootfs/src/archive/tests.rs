use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn parsing_any_bytes_ends_with_an_error_or_the_end(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let mut archive = Archive::new(bytes.as_slice());
        while let Ok(Some(_)) = archive.next_entry() {}
    }

    #[test]
    fn any_pax_record_is_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Pax::default().parse(&bytes);
    }
}

/// A header of this type and its content, padded to whole blocks.
fn block(kind: tar::EntryType, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_path("file").unwrap();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(content.len() as u64);
    header.set_cksum();
    let mut block = header.as_bytes().to_vec();
    block.extend(content);
    block.resize(block.len().next_multiple_of(BLOCK), 0);
    block
}

/// A PAX record, whose length includes its own digits.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    [format!("{length} {key}=").as_bytes(), value, b"\n"].concat()
}

fn attribute(number: usize, size: usize) -> Vec<u8> {
    record(&format!("SCHILY.xattr.user.{number}"), &vec![b'x'; size])
}

#[test]
fn an_entry_s_extensions_are_limited_together() {
    let file = block(tar::EntryType::Regular, b"");
    let with = |sizes: &[usize]| -> Vec<u8> {
        let headers = sizes.iter().enumerate();
        headers
            .flat_map(|(index, size)| block(tar::EntryType::XHeader, &attribute(index, *size)))
            .chain(file.clone())
            .collect()
    };
    let fine = with(&[500_000, 500_000]);
    let entry = Archive::new(fine.as_slice()).next_entry().unwrap().unwrap();
    assert_eq!(entry.xattrs.len(), 2);
    let refused = |bytes: &[u8]| Archive::new(bytes).next_entry().err().unwrap();
    let error = refused(&with(&[500_000; 3]));
    assert_eq!(
        error.to_string(),
        "the extension headers of one entry, up to byte 1001472 of the archive, are larger than the limit of 1048576 bytes"
    );
    // Maps of holes count as well; a record that replaces another counts once.
    let segments = record("GNU.sparse.offset", b"0");
    let segments = [segments, record("GNU.sparse.numbytes", b"0")].concat();
    let map = block(tar::EntryType::XHeader, &segments.repeat(20_000));
    let mut archive = map.repeat(4);
    archive.extend(&file);
    let error = refused(&archive);
    assert!(matches!(error, ArchiveError::ExtensionsTooLarge { .. }));
    let mut archive = block(tar::EntryType::XHeader, &attribute(0, 500_000)).repeat(4);
    archive.extend(&file);
    let entry = Archive::new(archive.as_slice()).next_entry().unwrap();
    assert_eq!(entry.unwrap().xattrs.len(), 1);
}

#[test]
fn a_global_header_gives_no_attributes() {
    let mut bytes = Vec::new();
    for number in 0..4 {
        let mut content = attribute(number, 500_000);
        content.extend(record("GNU.sparse.offset", b"0"));
        content.extend(record("GNU.sparse.numbytes", b"0"));
        content.extend(record("mtime", b"7"));
        bytes.extend(block(tar::EntryType::XGlobalHeader, &content));
    }
    bytes.extend(block(tar::EntryType::Regular, b""));
    let mut archive = Archive::new(bytes.as_slice());
    let entry = archive.next_entry().unwrap().unwrap();
    assert_eq!((entry.xattrs.len(), entry.mtime), (0, 7));
    assert!(archive.global.segments.is_empty());
    assert_eq!(archive.global.values.len(), 1);
}

#[test]
fn a_global_header_names_and_sizes_no_entry() {
    let mut content = record("path", b"../elsewhere");
    content.extend(record("linkpath", b"/etc/shadow"));
    content.extend(record("size", b"512"));
    content.extend(record("uid", b"7"));
    let mut bytes = block(tar::EntryType::XGlobalHeader, &content);
    bytes.extend(block(tar::EntryType::Regular, b"one"));
    let own = [record("path", b"second"), record("size", b"5")].concat();
    bytes.extend(block(tar::EntryType::XHeader, &own));
    bytes.extend(block(tar::EntryType::Regular, b"three"));
    let mut archive = Archive::new(bytes.as_slice());
    let mut entry = || archive.next_entry().unwrap().unwrap();
    let (first, second) = (entry(), entry());
    assert_eq!(
        (&first.path[..], first.size, first.uid),
        (&b"file"[..], 3, 7)
    );
    assert_eq!((&second.path[..], second.size), (&b"second"[..], 5));
    assert!(archive.next_entry().unwrap().is_none());
}

#[test]
fn an_extension_is_refused_by_its_declared_size() {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::XHeader);
    header.set_size(MAX_EXTENSION + 1);
    header.set_cksum();
    let error = Archive::new(header.as_bytes().as_slice())
        .next_entry()
        .unwrap_err();
    assert!(matches!(error, ArchiveError::ExtensionTooLarge { .. }));
}
