use super::*;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

/// A request of this type with these fields.
fn request(kind: u8, id: u32, fields: impl FnOnce(&mut Answer)) -> Vec<u8> {
    let mut request = Answer::to(id, kind);
    fields(&mut request);
    request.into_bytes()
}

/// The answers to requests, without their lengths.
fn answers(requests: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut output = Vec::new();
    serve(&requests.concat()[..], &mut output).unwrap();
    let mut answers = Vec::new();
    let mut input = &output[..];
    let mut answer = Vec::new();
    while read_request(&mut input, &mut answer).unwrap() {
        answers.push(answer.clone());
    }
    answers
}

/// The code of a status.
fn code(answer: &[u8]) -> u32 {
    let mut fields = Fields::new(answer);
    assert_eq!(fields.byte(), Some(kind::STATUS));
    fields.number().unwrap();
    fields.number().unwrap()
}

#[test]
fn a_file_is_written_read_and_closed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    let name = path.to_str().unwrap();
    let first = 0u32.to_be_bytes();
    let got = answers(&[
        request(kind::OPEN, 1, |it| {
            it.text(name);
            it.number(1 | 2 | 8);
            it.number(4);
            it.number(0o640);
        }),
        request(kind::WRITE, 2, |it| {
            it.bytes(&first);
            it.long(3);
            it.bytes(b"late");
        }),
        request(kind::READ, 3, |it| {
            it.bytes(&first);
            it.long(0);
            it.number(u32::MAX);
        }),
        request(kind::READ, 4, |it| {
            it.bytes(&first);
            it.long(7);
            it.number(10);
        }),
        request(kind::CLOSE, 5, |it| it.bytes(&first)),
        request(kind::CLOSE, 6, |it| it.bytes(&first)),
    ]);
    assert_eq!(got[0][0], kind::HANDLE);
    assert_eq!(code(&got[1]), 0);
    assert_eq!(&got[2][got[2].len() - 7..], b"\0\0\0late");
    assert_eq!(code(&got[3]), 1, "the end of the file");
    assert_eq!(code(&got[4]), 0);
    assert_eq!(code(&got[5]), 4, "a handle that is closed");
    assert_eq!(std::fs::read(&path).unwrap(), b"\0\0\0late");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

#[test]
fn only_posix_rename_replaces_an_existing_file() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    for path in [&from, &to] {
        std::fs::write(path, path.to_str().unwrap()).unwrap();
    }
    let both = |it: &mut Answer| {
        it.text(from.to_str().unwrap());
        it.text(to.to_str().unwrap());
    };
    let got = answers(&[
        request(kind::RENAME, 1, both),
        request(kind::EXTENDED, 2, |it| {
            it.text("posix-rename@openssh.com");
            both(it);
        }),
    ]);
    assert_eq!((code(&got[0]), code(&got[1])), (4, 0));
    assert!(std::fs::read_to_string(&to).unwrap().ends_with("from"));
}

#[test]
fn names_that_are_not_utf_8_are_listed_and_found() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let name = std::ffi::OsStr::from_bytes(b"odd\xff");
    std::fs::write(folder.path().join(name), "").unwrap();
    let got = answers(&[
        request(kind::OPENDIR, 1, |it| {
            it.text(folder.path().to_str().unwrap())
        }),
        request(kind::READDIR, 2, |it| it.bytes(&[0; 4])),
        request(kind::LSTAT, 3, |it| {
            it.bytes(folder.path().join(name).as_os_str().as_bytes());
        }),
    ]);
    let mut fields = Fields::new(&got[1][5..]);
    assert_eq!(fields.number(), Some(1));
    assert_eq!(fields.bytes(), Some(&b"odd\xff"[..]));
    assert_eq!(got[2][0], kind::ATTRS);
}

#[test]
fn a_listing_goes_on_after_entries_that_were_removed() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..300 {
        std::fs::write(folder.path().join(number.to_string()), "").unwrap();
    }
    let mut files = Files::default();
    let mut ask = |request: Vec<u8>| {
        let answer = answer(&mut files, &request[4..]).unwrap();
        answer.into_bytes()[4..].to_vec()
    };
    let opened = ask(request(kind::OPENDIR, 1, |it| {
        it.text(folder.path().to_str().unwrap());
    }));
    assert_eq!(opened[0], kind::HANDLE);
    let mut listing = || ask(request(kind::READDIR, 2, |it| it.bytes(&[0; 4])));
    assert_eq!(Fields::new(&listing()[5..]).number(), Some(100));
    // In the same order: all but the last of those that are left are removed, most of which were read
    // together with the first ones.
    let mut left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .skip(100)
        .map(|entry| entry.unwrap().path())
        .collect();
    let last = left.pop().unwrap();
    for path in left {
        std::fs::remove_file(path).unwrap();
    }
    let second = listing();
    assert_eq!(second[0], kind::NAME);
    let mut fields = Fields::new(&second[5..]);
    assert_eq!(fields.number(), Some(1));
    let name = last.file_name().unwrap().to_str().unwrap();
    assert_eq!(fields.bytes(), Some(name.as_bytes()));
}

#[test]
fn a_request_without_a_valid_length_ends_the_connection() {
    for length in [0, MAX_REQUEST as u32 + 1, u32::MAX] {
        assert!(serve(&length.to_be_bytes()[..], Vec::new()).is_err());
    }
    let cut = request(kind::STAT, 1, |it| it.text("/"));
    assert!(serve(&cut[..cut.len() - 1], Vec::new()).is_err());
}

proptest! {
    /// Kinds that change files are left out: the paths would be real ones.
    #[test]
    fn no_request_panics(
        kind in prop::sample::select(vec![
            kind::INIT, kind::CLOSE, kind::READ, kind::WRITE, kind::LSTAT, kind::FSTAT,
            kind::FSETSTAT, kind::OPENDIR, kind::READDIR, kind::REALPATH, kind::STAT,
            kind::READLINK, 0, 99, 255,
        ]),
        body in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut files = Files::default();
        let request: Vec<u8> = [&[kind][..], &body].concat();
        if let Some(answer) = answer(&mut files, &request) {
            let bytes = answer.into_bytes();
            let length = u32::from_be_bytes(bytes[..4].try_into().unwrap());
            prop_assert_eq!(length as usize, bytes.len() - 4);
        }
    }

    #[test]
    fn attributes_match_their_flags_or_are_refused(body in prop::collection::vec(any::<u8>(), 0..40)) {
        let mut fields = Fields::new(&body);
        if let Some(attributes) = fields.attributes() {
            let flags = u32::from_be_bytes(body[..4].try_into().unwrap());
            prop_assert_eq!(attributes.size.is_some(), flags & 1 != 0);
            prop_assert_eq!(attributes.owner.is_some(), flags & 2 != 0);
            prop_assert_eq!(attributes.mode.is_some(), flags & 4 != 0);
            prop_assert_eq!(attributes.times.is_some(), flags & 8 != 0);
        }
    }
}
