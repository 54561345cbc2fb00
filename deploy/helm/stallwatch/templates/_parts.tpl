{{- define "stallwatch.labels" -}}
app.kubernetes.io/name: stallwatch
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "stallwatch.selector" -}}
app.kubernetes.io/name: stallwatch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stallwatch.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "stallwatch.listen" -}}
{{ if eq .Values.exposure "loopback" }}127.0.0.1{{ end }}:10077
{{- end }}

{{/* How the kubelet asks; (dict "root" . "path" "/-/healthy") */}}
{{- define "stallwatch.probe" -}}
{{- $values := .root.Values -}}
{{- if eq $values.exposure "loopback" -}}
exec:
  command: [/opt/stallwatch/bin/python, -I, /opt/stallwatch/lib/healthy.py]
{{- else if and (eq $values.exposure "tls") $values.tls.clientCertificates -}}
tcpSocket:
  port: metrics
{{- else -}}
httpGet:
  path: {{ .path }}
  port: metrics
  scheme: {{ eq $values.exposure "tls" | ternary "HTTPS" "HTTP" }}
{{- end }}
{{- end }}
