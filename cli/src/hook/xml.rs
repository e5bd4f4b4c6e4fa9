//! A small XML document as a tree, within limits: libvirt's input to a hook is not trusted by a program that starts
//! guests.
//!
//! ```text
//!   text ──▶ events (quick-xml) ──▶ Element { name, namespace, attributes, text, children }
//!              │ a document type, an own entity, too much of anything: refused
//! ```
//!
//! Comments and processing instructions are ignored. Only XML's five own entities and references to characters are
//! expanded, so that no document becomes larger than its text.

use quick_xml::XmlVersion;
use quick_xml::events::{BytesRef, BytesStart, Event};
use quick_xml::name::ResolveResult;
use quick_xml::reader::NsReader;

/// Longest document: libvirt's own limit for its socket is 4 MiB per string.
pub const DOCUMENT_BYTES_MAX: usize = 4 << 20;
/// Most elements: a domain with a hundred disks has some thousand.
const ELEMENTS_MAX: usize = 100_000;
/// Deepest nesting: libvirt's XML is eight deep, foreign metadata may be deeper. A tree is dropped by recursion.
const DEPTH_MAX: usize = 64;

/// Reason why a text is refused as a document.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// The text is too long.
    #[error("it is longer than {DOCUMENT_BYTES_MAX} bytes")]
    TooLong,
    /// There are too many elements.
    #[error("it has more than {ELEMENTS_MAX} elements")]
    TooManyElements,
    /// The elements are too deep.
    #[error("its elements are more than {DEPTH_MAX} deep")]
    TooDeep,
    /// It defines a document type, and perhaps entities with it.
    #[error("it has a document type definition, which no domain has")]
    DocumentType,
    /// A reference to an entity that XML itself does not define.
    #[error("unknown entity &{0};")]
    UnknownEntity(String),
    /// There is no element, or one is not closed.
    #[error("it ends before its element does")]
    Unfinished,
    /// There are several outermost elements.
    #[error("it has more than one outermost element")]
    SeveralRoots,
    /// It is not well-formed XML.
    #[error("it is not XML: {0}")]
    Malformed(String),
}

impl From<quick_xml::Error> for XmlError {
    fn from(error: quick_xml::Error) -> XmlError {
        XmlError::Malformed(error.to_string())
    }
}

/// An element with its contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Name of the element without its prefix.
    pub name: String,
    /// Namespace of its prefix; empty without a prefix.
    pub namespace: String,
    /// Names, as written, and values, without declarations of namespaces.
    pub attributes: Vec<(String, String)>,
    /// Text directly in it, trimmed.
    pub text: String,
    /// Elements directly in it.
    pub children: Vec<Element>,
}

impl Element {
    /// Reads a document.
    ///
    /// # Errors
    /// [`XmlError`]; it panics on no text.
    pub fn parse(text: &str) -> Result<Element, XmlError> {
        if text.len() > DOCUMENT_BYTES_MAX {
            return Err(XmlError::TooLong);
        }
        let mut reader = NsReader::from_str(text);
        let mut tree = Tree::default();
        // Every event except the last consumes at least one byte of the text, which is finite.
        loop {
            let (namespace, event) = reader.read_resolved_event()?;
            match event {
                Event::Start(start) => tree.open(element(&namespace, &start)?)?,
                Event::Empty(start) => {
                    tree.open(element(&namespace, &start)?)?;
                    tree.close()?;
                }
                Event::End(_) => tree.close()?,
                Event::Text(text) => tree.add_text(&text.xml10_content()),
                Event::CData(text) => tree.add_text(&text.xml10_content()),
                Event::GeneralRef(reference) => tree.add_text(&resolved(&reference)?),
                Event::DocType(_) => return Err(XmlError::DocumentType),
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
                Event::Eof => return tree.finish(),
            }
        }
    }

    /// The first libvirt element of that name directly in this one.
    pub fn child(&self, name: &str) -> Option<&Element> {
        self.all(name).next()
    }

    /// All libvirt elements of that name directly in this one.
    pub fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Element> {
        self.children.iter().filter(move |child| child.name == name && child.namespace.is_empty())
    }

    /// The value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// The part that has been read: the open elements, outermost first, and the element that was closed last.
#[derive(Default)]
struct Tree {
    open: Vec<Element>,
    root: Option<Element>,
    elements: usize,
}

impl Tree {
    fn open(&mut self, element: Element) -> Result<(), XmlError> {
        self.elements += 1;
        match (self.open.len(), self.elements) {
            (DEPTH_MAX, _) => return Err(XmlError::TooDeep),
            (_, elements) if elements > ELEMENTS_MAX => return Err(XmlError::TooManyElements),
            (0, elements) if elements > 1 => return Err(XmlError::SeveralRoots),
            _ => {}
        }
        self.open.push(element);
        Ok(())
    }

    fn close(&mut self) -> Result<(), XmlError> {
        let mut closed = self.open.pop().ok_or(XmlError::Unfinished)?;
        closed.text = closed.text.trim().to_owned();
        match self.open.last_mut() {
            Some(parent) => parent.children.push(closed),
            None => self.root = Some(closed),
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str) {
        if let Some(element) = self.open.last_mut() {
            element.text.push_str(text);
        }
    }

    fn finish(self) -> Result<Element, XmlError> {
        self.root.filter(|_| self.open.is_empty()).ok_or(XmlError::Unfinished)
    }
}

/// The element that a tag opens, still empty.
fn element(namespace: &ResolveResult<'_>, tag: &BytesStart<'_>) -> Result<Element, XmlError> {
    let namespace = match namespace {
        ResolveResult::Bound(namespace) => namespace.as_ref().to_owned(),
        ResolveResult::Unbound => String::new(),
        ResolveResult::Unknown(prefix) => {
            return Err(XmlError::Malformed(format!("the prefix {prefix} is not declared")));
        }
    };
    let mut attributes = Vec::new();
    // Without the check for duplicates, which compares every pair: a tag may have half a million attributes.
    for attribute in tag.attributes().with_checks(false) {
        let attribute = attribute.map_err(|error| XmlError::Malformed(error.to_string()))?;
        if attribute.key.as_namespace_binding().is_none() {
            let value = attribute.normalized_value(XmlVersion::Implicit1_0)?;
            attributes.push((attribute.key.as_ref().to_owned(), value.into_owned()));
        }
    }
    let name = tag.local_name().as_ref().to_owned();
    Ok(Element { name, namespace, attributes, ..Element::default() })
}

fn resolved(reference: &BytesRef<'_>) -> Result<String, XmlError> {
    if let Some(character) = reference.resolve_char_ref()? {
        return Ok(character.into());
    }
    let name = reference.xml10_content();
    let text = quick_xml::escape::resolve_predefined_entity(&name);
    text.map(str::to_owned).ok_or_else(|| XmlError::UnknownEntity(name.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_tree_has_names_namespaces_attributes_and_text() {
        let text = "<?xml version='1.0'?><!-- x --><a b='1 &lt; 2' xmlns:w='urn:w'> x<w:c d='e'/>&amp;&#65; </a>";
        let root = Element::parse(text).expect("a document");
        assert_eq!((root.name.as_str(), root.text.as_str(), root.attribute("b")), ("a", "x&A", Some("1 < 2")));
        assert_eq!(root.attributes.len(), 1, "the namespace is not one of its attributes");
        let c = &root.children[0];
        assert_eq!((c.name.as_str(), c.namespace.as_str(), c.attribute("d")), ("c", "urn:w", Some("e")));
        assert_eq!(root.child("c"), None, "c is not a libvirt element");
    }

    #[test]
    fn a_text_that_is_not_a_document_is_refused() {
        for (text, error) in [
            ("", XmlError::Unfinished),
            ("<a>", XmlError::Unfinished),
            ("<a/><b/>", XmlError::SeveralRoots),
            ("<a>&bomb;</a>", XmlError::UnknownEntity("bomb".into())),
            ("<!DOCTYPE a [<!ENTITY b 'bb'>]><a>&b;</a>", XmlError::DocumentType),
        ] {
            assert_eq!(Element::parse(text), Err(error), "{text}");
        }
        for text in ["<a></b>", "</a>", "<a b=></a>", "<w:a/>", "<a b='&bomb;'/>"] {
            assert!(matches!(Element::parse(text), Err(XmlError::Malformed(_))), "{text}");
        }
    }

    #[test]
    fn length_depth_and_number_are_limited() {
        let nested = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
        assert!(Element::parse(&nested(DEPTH_MAX)).is_ok());
        assert_eq!(Element::parse(&nested(DEPTH_MAX + 1)), Err(XmlError::TooDeep));
        assert_eq!(Element::parse(&"<a>".repeat(DOCUMENT_BYTES_MAX / 3)), Err(XmlError::TooDeep));
        let many = format!("<a>{}</a>", "<b/>".repeat(ELEMENTS_MAX));
        assert_eq!(Element::parse(&many), Err(XmlError::TooManyElements));
        assert_eq!(Element::parse(&" ".repeat(DOCUMENT_BYTES_MAX + 1)), Err(XmlError::TooLong));
    }

    #[test]
    fn a_tag_of_half_a_million_attributes_is_read_in_one_pass() {
        let text = format!("<a{}/>", " b=''".repeat(500_000));
        assert_eq!(Element::parse(&text).map(|root| root.attributes.len()), Ok(500_000));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = Element::parse(&text);
        }

        #[test]
        fn no_markup_panics(text in "([<>/&;'\"=?! a-z:\\[\\]-]|<!\\[CDATA\\[|<!DOCTYPE|xmlns)*") {
            let _ = Element::parse(&text);
        }
    }
}
