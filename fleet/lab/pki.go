package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/keyutil"
)

// Certificates are good from an hour ago, for machines with clocks that differ a little, and for a day: no lab lives
// longer.
const (
	validBefore = time.Hour
	validFor    = 24 * time.Hour
)

// pki is a folder with a certificate authority and what it signed. Files that exist are kept, so that clients of an
// earlier server with the same folder still know this one.
type pki struct {
	folder string
	ca     *x509.Certificate
	caKey  *ecdsa.PrivateKey
}

func (p *pki) file(name string) string {
	return filepath.Join(p.folder, name)
}

// openPKI makes the authority, or reads it.
func openPKI(folder string) (*pki, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	p := &pki{folder: folder}
	key, err := p.key("ca")
	if err != nil {
		return nil, err
	}
	p.caKey = key
	template := certificate(pkix.Name{CommonName: "fleet-lab"})
	template.IsCA = true
	template.KeyUsage |= x509.KeyUsageCertSign
	p.ca, err = p.signed("ca", template, template, key)
	return p, err
}

// key is a private key in NAME.key, made if it does not exist.
func (p *pki) key(name string) (*ecdsa.PrivateKey, error) {
	path := p.file(name + ".key")
	if parsed, err := keyutil.PrivateKeyFromFile(path); err == nil {
		key, is := parsed.(*ecdsa.PrivateKey)
		if !is {
			return nil, fmt.Errorf("%s has no key of an elliptic curve", path)
		}
		return key, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return nil, err
	}
	return key, os.WriteFile(path, text, 0o600)
}

func certificate(subject pkix.Name) *x509.Certificate {
	return &x509.Certificate{
		Subject:               subject,
		NotBefore:             time.Now().Add(-validBefore),
		NotAfter:              time.Now().Add(validFor),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		BasicConstraintsValid: true,
	}
}

// signed is the certificate in NAME.crt, made and signed if it does not exist.
func (p *pki) signed(
	name string, template, parent *x509.Certificate, key *ecdsa.PrivateKey,
) (*x509.Certificate, error) {
	path := p.file(name + ".crt")
	if text, err := os.ReadFile(path); err == nil {
		block, _ := pem.Decode(text)
		if block == nil {
			return nil, fmt.Errorf("%s has no certificate", path)
		}
		return x509.ParseCertificate(block.Bytes)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), p.caKey)
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// server makes NAME.crt and NAME.key of a server on loopback.
func (p *pki) server(name string) error {
	key, err := p.key(name)
	if err != nil {
		return err
	}
	template := certificate(pkix.Name{CommonName: name})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 0, 0, 1)}
	_, err = p.signed(name, template, p.ca, key)
	return err
}

// client makes the certificate of a user in groups, and its kubeconfig in FOLDER/NAME.kubeconfig.
func (p *pki) client(folder, name, user string, groups []string, server string) (string, error) {
	key, err := p.key(name)
	if err != nil {
		return "", err
	}
	template := certificate(pkix.Name{CommonName: user, Organization: groups})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if _, err := p.signed(name, template, p.ca, key); err != nil {
		return "", err
	}
	read := func(name string) []byte {
		text, failed := os.ReadFile(p.file(name))
		err = errors.Join(err, failed)
		return text
	}
	config := api.NewConfig()
	config.Clusters["lab"] = &api.Cluster{Server: server, CertificateAuthorityData: read("ca.crt")}
	config.AuthInfos[name] = &api.AuthInfo{
		ClientCertificateData: read(name + ".crt"),
		ClientKeyData:         read(name + ".key"),
	}
	config.Contexts["lab"] = &api.Context{Cluster: "lab", AuthInfo: name}
	config.CurrentContext = "lab"
	if err != nil {
		return "", err
	}
	path := filepath.Join(folder, name+".kubeconfig")
	return path, clientcmd.WriteToFile(*config, path)
}
