//! Our words on the Linux command line.
//!
//! ```text
//! console=ttyS0 hugepages=64 wideleaf.page=2m wideleaf.kernel="npb.cg class=S"
//! └─────────── Linux's ────┘ └── ours ───────────────────────────────────────┘
//! ```
//!
//! Quotes hold words together, around the value or around the whole, as for Linux itself
//! (Documentation/admin-guide/kernel-parameters.rst).

use thiserror::Error;
use wideleaf_policies::Bytes;
use wideleaf_protocol::linux::{KEY_KERNEL, KEY_MEMORY, KEY_PAGE, KEY_PREFIX, KEY_THREADS};
use wideleaf_protocol::{GuestPage, VCPUS_MAX};

use crate::failure::Failure;

/// Backing of the kernel's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Base pages, whatever Linux would do by itself.
    Base4K,
    /// Transparent huge pages, if Linux has and permits them.
    #[default]
    Thp,
    /// Pages of 2 MiB of the hugetlb pool.
    Huge2M,
    /// Pages of 1 GiB of the hugetlb pool.
    Giant1G,
}

impl Page {
    const ALL: [(&str, Page); 4] =
        [("4k", Page::Base4K), ("thp", Page::Thp), ("2m", Page::Huge2M), ("1g", Page::Giant1G)];

    /// The requested size, for the `hello` line.
    pub const fn asked_for(self) -> GuestPage {
        match self {
            Page::Base4K => GuestPage::Base4K,
            Page::Thp | Page::Huge2M => GuestPage::Huge2M,
            Page::Giant1G => GuestPage::Giant1G,
        }
    }
}

/// Our words on the Linux command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters<'a> {
    /// A kernel with its parameters, instead of the one that the image was made for.
    pub kernel: Option<&'a str>,
    /// Number of threads.
    pub threads: Option<usize>,
    /// Backing of the kernel's memory.
    pub page: Option<Page>,
    /// Size of the kernel's memory.
    pub memory: Option<Bytes>,
}

/// Reason why the Linux command line is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// A word with our prefix that does not exist.
    #[error(
        "unknown word {0} on the Linux command line; \
         choose one of {KEY_KERNEL}=, {KEY_THREADS}=, {KEY_PAGE}=, {KEY_MEMORY}="
    )]
    Unknown(String),
    /// A word that is given twice.
    #[error("{0}= is given twice on the Linux command line")]
    Twice(&'static str),
    /// An invalid value.
    #[error("{key}={value}: expected {expected}")]
    Value {
        /// Key of the word.
        key: &'static str,
        /// Value that was given.
        value: String,
        /// Values that are allowed.
        expected: String,
    },
    /// A word for kernels, in an image with a program.
    #[error("{0}= is for kernels, and the image has a program: leave it out, or name a kernel with {KEY_KERNEL}=")]
    ForKernels(&'static str),
}

impl From<ParameterError> for Failure {
    fn from(error: ParameterError) -> Failure {
        Failure::bad_arguments(error)
    }
}

impl<'a> Parameters<'a> {
    /// Reads our words and leaves all others alone.
    ///
    /// # Errors
    /// [`ParameterError`] for our first invalid word.
    pub fn parse(cmdline: &'a str) -> Result<Parameters<'a>, ParameterError> {
        let mut parameters = Parameters::default();
        let mut seen = Vec::new();
        for word in words(cmdline).map(between_quotes).filter(|word| word.starts_with(KEY_PREFIX)) {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let key = parameters.set(key, between_quotes(value))?;
            if seen.contains(&key) {
                return Err(ParameterError::Twice(key));
            }
            seen.push(key);
        }
        Ok(parameters)
    }

    /// Checks that a program can be run with these words: it gets its memory and its threads from Linux.
    ///
    /// # Errors
    /// [`ParameterError::ForKernels`] for a word that would have no effect.
    pub fn check_for_program(&self) -> Result<(), ParameterError> {
        let Parameters { kernel: _, threads, page, memory } = self;
        let given = [(KEY_THREADS, threads.is_some()), (KEY_PAGE, page.is_some()), (KEY_MEMORY, memory.is_some())];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((key, _)) => Err(ParameterError::ForKernels(key)),
            None => Ok(()),
        }
    }

    fn set(&mut self, key: &str, value: &'a str) -> Result<&'static str, ParameterError> {
        let wrong = |key, expected: String| ParameterError::Value { key, value: value.to_owned(), expected };
        match key {
            KEY_KERNEL if !value.is_empty() => {
                self.kernel = Some(value);
                Ok(KEY_KERNEL)
            }
            KEY_KERNEL => Err(wrong(KEY_KERNEL, "a kernel and its parameters, in quotes".to_owned())),
            KEY_THREADS => {
                let count = value.parse().ok().filter(|count| (1..=VCPUS_MAX).contains(count));
                let expected = || wrong(KEY_THREADS, format!("a count from 1 to {VCPUS_MAX}"));
                self.threads = Some(count.ok_or_else(expected)?);
                Ok(KEY_THREADS)
            }
            KEY_PAGE => {
                let page = Page::ALL.iter().find(|(name, _)| *name == value);
                self.page = Some(page.ok_or_else(|| wrong(KEY_PAGE, "4k, thp, 2m or 1g".to_owned()))?.1);
                Ok(KEY_PAGE)
            }
            KEY_MEMORY => {
                let expected = |error| wrong(KEY_MEMORY, format!("a size ({error})"));
                self.memory = Some(Bytes::parse(value).map_err(expected)?);
                Ok(KEY_MEMORY)
            }
            _ => Err(ParameterError::Unknown(key.to_owned())),
        }
    }
}

/// Splits at white space outside quotes.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let is_border = move |c: char| {
        is_quoted ^= c == '"';
        c.is_ascii_whitespace() && !is_quoted
    };
    line.split(is_border).filter(|word| !word.is_empty())
}

fn between_quotes(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::units::mib;

    use super::*;

    #[test]
    fn our_words_are_found_among_those_of_linux() {
        let line = "console=ttyS0 wideleaf.kernel=\"npb.cg class=S\" quiet wideleaf.threads=2 \
            wideleaf.page=2m wideleaf.memory=64M\n";
        let parameters = Parameters {
            kernel: Some("npb.cg class=S"),
            threads: Some(2),
            page: Some(Page::Huge2M),
            memory: Some(mib(64)),
        };
        assert_eq!(Parameters::parse(line), Ok(parameters));
        assert_eq!(Parameters::parse("console=ttyS0 panic=-1 -- x"), Ok(Parameters::default()));
    }

    #[test]
    fn quotes_may_be_around_the_value_or_around_the_whole_word() {
        let of = |line| Parameters::parse(line).map(|parameters| parameters.kernel);
        assert_eq!(of("a \"wideleaf.kernel=gups log2_words=16\" b"), Ok(Some("gups log2_words=16")));
        assert_eq!(of("a wideleaf.kernel=\"gups log2_words=16\" b"), Ok(Some("gups log2_words=16")));
        assert_eq!(of("a wideleaf.kernel=gups b"), Ok(Some("gups")));
    }

    #[test]
    fn a_word_about_a_kernel_is_refused_where_a_program_runs() {
        let check = |line: &str| Parameters::parse(line).expect("the words are valid").check_for_program();
        assert_eq!(check("console=ttyS0 quiet"), Ok(()));
        let words = [(KEY_THREADS, "2"), (KEY_PAGE, "thp"), (KEY_MEMORY, "64M")];
        for (key, value) in words {
            assert_eq!(check(&format!("quiet {key}={value}")), Err(ParameterError::ForKernels(key)));
        }
        let line = ParameterError::ForKernels(KEY_PAGE).to_string();
        assert!(line.starts_with("wideleaf.page= is for kernels, and the image has a program: leave it out"), "{line}");
    }

    #[test]
    fn an_invalid_word_is_refused_with_the_allowed_values() {
        let refused = |line| Parameters::parse(line).map_err(|error| error.to_string()).expect_err("refused");
        assert!(
            refused("wideleaf.pages=2m")
                .starts_with("unknown word wideleaf.pages on the Linux command line; choose one of")
        );
        assert_eq!(refused("wideleaf.page=16k"), "wideleaf.page=16k: expected 4k, thp, 2m or 1g");
        assert_eq!(refused("wideleaf.page"), "wideleaf.page=: expected 4k, thp, 2m or 1g");
        assert_eq!(refused("wideleaf.threads=0"), "wideleaf.threads=0: expected a count from 1 to 16");
        assert_eq!(
            refused("wideleaf.threads=2 wideleaf.threads=2"),
            "wideleaf.threads= is given twice on the Linux command line"
        );
        assert!(refused("wideleaf.memory=much").starts_with("wideleaf.memory=much: expected a size"));
        assert_eq!(refused("wideleaf.kernel="), "wideleaf.kernel=: expected a kernel and its parameters, in quotes");
    }
}
